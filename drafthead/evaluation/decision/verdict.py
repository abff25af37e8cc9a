"""Deploy or not: the decision a reader came for, with the interval and the reason it rests on.

Level by level the rule looks at output throughput at equal requests in flight and at the median latency of a request,
which is what the operator pays and what the user feels, and at the service level if the recipe has one. A level decides
nothing whose load was not reached, whose requests failed, whose interval includes zero, whose gain exceeds what its
acceptance can give (a step with drafts is never shorter than one without), or that changes by something else than its
workloads add up to. Over all levels the traffic decides, and nothing is deployed for a traffic of which less than half
was measured. Whatever the decision, the reason names every measure that got worse by more than a tenth.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np
import pandas as pd
from scipy import stats

from drafthead.config.evaluation import SLOConfig
from drafthead.evaluation.columns import LevelKey
from drafthead.evaluation.comparison import across_blocks, throughput_change
from drafthead.evaluation.results.levels import MEASURE, THROUGHPUT, LoadComparison
from drafthead.evaluation.workload import BASELINE
from drafthead.statistics import CONFIDENCE, Array, Change

Kept = Literal["kept", "unresolved", "missed"]
_ORDER = get_args(Kept)


def service_level(level: LoadComparison, slo: SLOConfig) -> tuple[Kept, str]:
    """Whether the method keeps all limits, and in words with the figures whether baseline and method do."""
    worst: Kept = "kept"
    limits = []
    for name, column, limit_ms in (("TTFT", "ttft_s", slo.ttft_ms), ("TPOT", "tpot_s", slo.tpot_ms)):
        if limit_ms is not None:
            sides = [level.paired[f"{column}_{side}"].explode().dropna() for side in ("base", "head")]
            (_, before), (kept, after) = (_keeps(times, limit_ms / 1e3, slo.percentile) for times in sides)
            worst = max(worst, kept, key=_ORDER.index)
            limits.append(f"{name} P{slo.percentile} {before} → {after} of {limit_ms:g} ms")
    return worst, "; ".join(limits)


def _keeps(times: pd.Series, limit: float, percentile: int) -> tuple[Kept, str]:
    """Judged is the share of requests within the limit, against the share that must be.

    The percentile keeps a limit when at least that share of requests does, so the interval is that of a share (Clopper
    and Pearson 1934), which holds for any distribution of times. Repeated in several blocks, requests of a prompt are
    no independent evidence: the share is of all requests, and its sample as large as there are prompts.
    """
    if not len(times):  # responses of one token have no time per token
        return "unresolved", "no request has it"
    prompts = times.index.nunique()
    kept_by = round(prompts * (times <= limit).mean())
    within = stats.binomtest(kept_by, prompts).proportion_ci(CONFIDENCE, method="exact")
    share = percentile / 100
    kept: Kept = "kept" if within.low >= share else "missed" if within.high < share else "unresolved"
    return kept, f"{1e3 * np.percentile(times.astype(float), percentile):.1f} ms ({kept})"


# Of the requests: those that failed may be the slow ones, and the others had the server to themselves.
MOST_FAILED = 0.01
NAMED_LOSS = 0.1  # of a measure, from which on a reason names it
LEAST_SHARE = 0.5  # of the time that a head would be deployed for: at loads that were run and reached
DEPLOY, UP_TO, DO_NOT, UNKNOWN = "DEPLOY", "DEPLOY UP TO", "DO NOT DEPLOY", "INCONCLUSIVE"


class LevelVerdict(NamedTuple):
    """A decision for one load, in words; UP_TO is none."""

    concurrency: int
    decision: str
    reason: str


@dataclass(frozen=True)
class Verdict:
    """A decision for the whole traffic.

    Attributes:
        key: what was judged, over several loads.
        decision: one of the four.
        up_to: c*, where the decision is DEPLOY UP TO.
        change: of output throughput over the loads of the traffic that were measured and reached (up to c*, where
            there is one), weighted by their share of the time.
        reason: why, and on lines of their own what decides nothing at which load and every resolved loss above
            NAMED_LOSS.
        levels: every load of the traffic.
    """

    key: LevelKey
    decision: str
    up_to: int | None
    change: Change
    reason: str
    levels: tuple[LevelVerdict, ...]

    @property
    def headline(self) -> str:
        """The decision with its load."""
        return f"{self.decision} concurrency {self.up_to}" if self.up_to else self.decision


def judge(level: LoadComparison, slo: SLOConfig | None = None) -> LevelVerdict:
    """The decision for one measured level: the first rule that holds."""
    throughput, latency = level.changes[THROUGHPUT.key], level.changes["e2e_p50"]
    keeps, limits = service_level(level, slo or SLOConfig())
    wrong, unresolved = reason_to_ignore(level), f"unresolved at {len(level.paired)} prompts"
    rules = (
        (wrong, UNKNOWN, wrong),
        (keeps == "missed", DO_NOT, "service level missed"),
        (throughput.resolved and throughput.value < 0, DO_NOT, "slower"),
        (latency.resolved and latency.value < 0, DO_NOT, "requests take longer"),
        (keeps == "unresolved", UNKNOWN, f"service level {unresolved}"),
        (throughput.resolved, DEPLOY, "faster"),
        (True, UNKNOWN, unresolved),
    )
    decision, why = next((decision, why) for holds, decision, why in rules if holds)
    main = (THROUGHPUT.key, "e2e_p50")
    hits = level.prefix_hits
    before, after = level.response_length
    figures = [
        *(_figure(level, key) for key in main),
        f"{level.failed} of {level.requests} requests failed" if level.failed else "",
        limits,
        f"{_HITS} {_hits_text(level)} %" if abs(hits[level.key.method] - hits[BASELINE]) >= _LEAST_HITS else "",
        *(_figure(level, key) for key in losses(level) if key in MEASURE and key not in main),
        f"mean response {before:.1f} → {after:.1f} tokens, so it is not the same work" if level.length_differs else "",
    ]
    return LevelVerdict(level.key.concurrency, decision, f"{why}: {'; '.join(filter(None, figures))}")


def _figure(level: LoadComparison, key: str) -> str:
    """A measure of baseline and method, and its change."""
    measure = MEASURE[key]
    return f"{measure.label} {_values_text(level, key)} {measure.unit} ({level.changes[key].text()})"


def _values_text(level: LoadComparison, key: str) -> str:
    """A measure of baseline and method, in its unit."""
    return " → ".join(map(MEASURE[key].text, level.values[key]))


_LEAST_HITS = 0.01  # of the prompt tokens
_HITS = "prefix-cache hits"


def _hits_text(level: LoadComparison) -> str:
    before, after = (100 * level.prefix_hits[name] for name in (BASELINE, level.key.method))
    return f"{before:.1f} → {after:.1f}"


def losses(level: LoadComparison) -> dict[str, tuple[str, str]]:
    """Every resolved loss above NAMED_LOSS: measure -> its name with its unit, and what it is without and with drafts.

    Of a level that decides nothing there is none.

    Hits in the prefix cache are counted, not sampled: those that are lost are resolved.
    """
    if reason_to_ignore(level):
        return {}
    found = {
        key: (MEASURE[key].title, _values_text(level, key))
        for key, change in level.changes.items()
        if change.resolved and change.loss > NAMED_LOSS
    }
    lost = level.prefix_hits[BASELINE] - level.prefix_hits[level.key.method]
    if lost >= _LEAST_HITS and lost > NAMED_LOSS * level.prefix_hits[BASELINE]:
        found[_HITS] = f"{_HITS} (%)", _hits_text(level)
    return found


def reason_to_ignore(level: LoadComparison) -> str:
    """Why a level decides nothing, whatever its figures; empty where it can."""
    if level.failed > MOST_FAILED * level.requests:
        return "requests failed, see the column `error` of requests-*.parquet"
    if not level.reached:
        ran = f"{level.running[BASELINE]:.1f} without drafts, {level.running[level.key.method]:.1f} with them"
        return (
            f"not reached: {level.key.concurrency} requests were to run at once, {ran} did; the others were not sent "
            "(too few prompts) or waited in the engine's queue (KV cache)"
        )
    if level.contradicted_by:
        return (
            f"the machine was not steady: all prompts together change by {level.changes[THROUGHPUT.key].text()}, their "
            f"workloads alone add up to {level.contradicted_by.text()}; set eval.repeats=3 and keep other work off it"
        )
    # More than one token's time per accepted draft: no head can do that.
    if level.changes[THROUGHPUT.key].low > level.length_of_all - 1:
        noise = f"gains more than its acceptance length of {level.length_of_all:.2f} over all responses allows"
        return f"{noise}, so the machine was not the same for both"
    return ""


def decide(levels: Sequence[LoadComparison], shares: dict[int, float], slo: SLOConfig | None = None) -> Verdict:
    """The decision for one workload, method and draft length.

    Args:
        levels: measured, of one workload, method and K.
        shares: requests in flight -> share of the time (TrafficConfig.shares).
        slo: the service level.
    """
    measured = {level.key.concurrency: level for level in levels}
    found = [
        # Never deployed at where it was not run: a model's price is no measurement.
        judge(measured[c], slo) if c in measured else LevelVerdict(c, UNKNOWN, f"not run; add {c} to eval.concurrency")
        for c in sorted(shares)
    ]
    reached = [measured[c] for c in shares if c in measured and not reason_to_ignore(measured[c])]
    change = _over(reached, shares)
    words = {DEPLOY: "gains", DO_NOT: "loses", UNKNOWN: "unresolved"}
    at = {word: [v.concurrency for v in found if v.decision == decision] for decision, word in words.items()}
    good, bad = at["gains"], at["loses"]
    reason = ", ".join(f"{word} at concurrency {', '.join(map(str, loads))}" for word, loads in at.items() if loads)
    text = f"{reason}; output throughput {change.text()} over the traffic"
    up_to, decision = max((c for c in good if not any(b < c for b in bad)), default=None), DEPLOY
    if up_to is None:  # gains nowhere, or only above a load where it loses
        decision = DO_NOT if bad and not good else UNKNOWN
    else:
        below = [level for level in reached if level.key.concurrency <= up_to]
        ran = sum(shares[level.key.concurrency] for level in below) / sum(shares[c] for c in shares if c <= up_to)
        if ran < LEAST_SHARE:
            text = f"{text}; only {ran:.0%} of the traffic up to {up_to} was measured"
            up_to, decision = None, UNKNOWN
        elif up_to == max(shares):
            up_to = None
        else:
            decision, change = UP_TO, _over(below, shares)
            text = f"{reason}; output throughput {change.text()} up to concurrency {up_to}"
    if change.resolved and change.value < 0:  # loads that are each unresolved may lose together
        up_to, decision = None, DO_NOT
    elif change.value < 0 and decision in (DEPLOY, UP_TO):
        up_to, decision = None, UNKNOWN
    text = ".\n".join([text, *_undecided(measured, shares), *_losses(reached)])
    return Verdict(levels[0].key.over_loads, decision, up_to, change, text, tuple(found))


def _undecided(measured: Mapping[int, LoadComparison], shares: Mapping[int, float]) -> list[str]:
    """What makes loads of the traffic decide nothing, whatever their figures."""
    reasons = {c: reason_to_ignore(measured[c]) for c in sorted(shares) if c in measured}
    return [f"At concurrency {c}: {reason}" for c, reason in reasons.items() if reason]


def _losses(levels: Sequence[LoadComparison]) -> list[str]:
    """One line with every loss at every load, baseline → method; none where nothing is lost."""
    found: dict[str, list[str]] = {}
    for level in sorted(levels, key=lambda level: level.key.concurrency):
        for name, values in losses(level).values():
            found.setdefault(name, []).append(f"{values} at {level.key.concurrency}")
    text = "; ".join(f"{name} {', '.join(at)}" for name, at in found.items())
    return [f"Worse by more than a tenth, by concurrency: {text}"] if text else []


def traffic_change(pairs: Mapping[int, pd.DataFrame], weights: Mapping[int, float], by_block: Array) -> Change:
    """Output throughput over a mix of loads, resampled by prompt, with what blocks differ by; NaN without a load.

    Args:
        pairs: load -> one row per prompt, with columns output_tokens and share_s of two methods (_base, _head).
        weights: load -> share of the time of the first.
        by_block: (L, B) the change at every load in every block of server starts alone, as a fraction.
    """
    if not pairs:
        return Change(np.nan, np.nan, np.nan)

    def stacked(column: str) -> Array:  # (L, P)
        return pd.DataFrame({c: pair[column] for c, pair in pairs.items()}).fillna(0.0).to_numpy(float).T

    share = np.array([weights[c] for c in pairs])
    change = throughput_change(
        stacked("output_tokens_head"), stacked("share_s_head"), stacked("output_tokens_base"), stacked("share_s_base"),
        share,
    )  # fmt: skip
    return across_blocks(change, share.sum() / (share[:, None] / (1 + by_block)).sum(axis=0) - 1)


def _over(levels: Sequence[LoadComparison], shares: dict[int, float]) -> Change:
    """Against no speculation, over the loads of these levels."""
    pairs = {level.key.concurrency: level.paired for level in levels}
    return traffic_change(pairs, shares, np.array([level.by_block[THROUGHPUT.key] for level in levels]))
