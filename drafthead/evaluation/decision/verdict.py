"""Deploy or not: the decision a reader came for, with the interval and the reason it rests on.

Level by level the rule looks at output throughput at equal requests in flight and at the median latency of a request,
which is what the operator pays and what the user feels, and at the service level if the recipe has one. A level whose
load was not reached, whose requests failed, whose interval includes zero, or whose gain exceeds what its acceptance can
give (a step with drafts is never shorter than one without), decides nothing. Over all levels the traffic decides.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from scipy import stats

from drafthead.config.traffic import SLOConfig
from drafthead.evaluation.comparison import Change, across_blocks, mixed_throughput_change
from drafthead.evaluation.decision.pricing import Priced
from drafthead.evaluation.results.levels import THROUGHPUT, Level
from drafthead.evaluation.workload import BASELINE, NAMES
from drafthead.statistics import CONFIDENCE, Array, Interval

Kept = Literal["kept", "missed", "unresolved"]


@dataclass(frozen=True)
class ServiceLevel:
    """One level against the limits.

    Attributes:
        baseline, head: whether each keeps every limit.
        text: both in words, with the figures; empty without a limit.
    """

    baseline: Kept
    head: Kept
    text: str


def service_level(level: Level, slo: SLOConfig) -> ServiceLevel:
    """The share of requests within each limit, against the share that must be.

    The percentile keeps a limit when at least that share of requests does, so the interval is that of a share
    (Clopper and Pearson 1934), which holds for any distribution of times.
    """
    verdicts: dict[str, list[Kept]] = {"base": [], "head": []}
    limits = []
    for name, column, limit_ms in (("TTFT", "ttft_s", slo.ttft_ms), ("TPOT", "tpot_s", slo.tpot_ms)):
        if limit_ms is None:
            continue
        figures = []
        for side, found in verdicts.items():
            times = level.paired[f"{column}_{side}"].dropna().to_numpy(float)
            found.append(_keeps(times, limit_ms / 1e3, slo.percentile / 100))
            at = f"{1e3 * np.percentile(times, slo.percentile):.1f} ms" if len(times) else "no request has it"
            figures.append(f"{at} ({found[-1]})")
        limits.append(f"{name} P{slo.percentile} {' → '.join(figures)} of {limit_ms:g} ms")
    return ServiceLevel(_worst(verdicts["base"]), _worst(verdicts["head"]), "; ".join(limits))


def _keeps(times: Array, limit: float, share: float) -> Kept:
    if not len(times):  # responses of one token have no time per token
        return "unresolved"
    within = stats.binomtest(int((times <= limit).sum()), len(times)).proportion_ci(CONFIDENCE, method="exact")
    if within.low >= share:
        return "kept"
    return "missed" if within.high < share else "unresolved"


def _worst(found: list[Kept]) -> Kept:
    return next((state for state in ("missed", "unresolved") if state in found), "kept")


# Of the requests: those that failed may be the slow ones, and the others had the server to themselves.
MOST_FAILED = 0.01
DEPLOY, UP_TO, DO_NOT, UNKNOWN = "DEPLOY", "DEPLOY UP TO", "DO NOT DEPLOY", "INCONCLUSIVE"


@dataclass(frozen=True)
class LevelVerdict:
    """A decision for one load, in words; UP_TO is none."""

    concurrency: int
    decision: str
    reason: str


@dataclass(frozen=True)
class Verdict:
    """A decision for the whole traffic.

    Attributes:
        workload, method, K: what was judged.
        decision: one of the four.
        up_to: c*, where the decision is DEPLOY UP TO.
        change: of output throughput over the loads of the traffic that were measured and reached (up to c*, where
            there is one), weighted by their share of the time.
        reason: why.
        levels: every load of the traffic.
    """

    workload: str
    method: str
    K: int
    decision: str
    up_to: int | None
    change: Change
    reason: str
    levels: tuple[LevelVerdict, ...]

    @property
    def headline(self) -> str:
        """The decision with its load."""
        return f"{self.decision} concurrency {self.up_to}" if self.up_to else self.decision


def judge(level: Level, slo: SLOConfig | None = None) -> LevelVerdict:
    """The decision for one measured level."""
    c = level.concurrency
    throughput, latency = level.changes[THROUGHPUT.key], level.changes["e2e_p50"]
    figures = f"output throughput {change_text(throughput)}, median latency {change_text(latency)}"
    if wrong := _unfit(level):
        return LevelVerdict(c, UNKNOWN, f"{wrong}: {figures}")
    figures += f"; {_failures(level)}" if level.failed else ""
    service = service_level(level, slo or SLOConfig())
    figures += f"; {service.text}" if service.text else ""
    figures += _prefix_hits(level)
    if service.head == "missed":
        missed = (
            "misses the service level, as the baseline does"
            if service.baseline == "missed"
            else "breaks the service level"
        )
        return LevelVerdict(c, DO_NOT, f"{missed}: {figures}")
    if throughput.resolved and throughput.interval.value < 0:
        return LevelVerdict(c, DO_NOT, f"slower: {figures}")
    if latency.resolved and latency.interval.value < 0:
        return LevelVerdict(c, DO_NOT, f"requests take longer: {figures}")
    if service.head == "unresolved":
        return LevelVerdict(c, UNKNOWN, f"service level unresolved at {level.pairs} prompts: {figures}")
    if throughput.resolved:
        return LevelVerdict(c, DEPLOY, f"faster: {figures}")
    return LevelVerdict(c, UNKNOWN, f"unresolved at {level.pairs} prompts: {figures}")


def _unfit(level: Level) -> str:
    """Why a level decides nothing, whatever its figures; empty where it can."""
    if level.failed > MOST_FAILED * level.requests:
        return f"{_failures(level)}, see the column `error` of requests-*.parquet"
    if not level.reached:
        methods = ", ".join(f"{value:.1f} ({NAMES[method]})" for method, value in level.running.items())
        return (
            f"not reached: {level.concurrency} requests were to run at once, {methods} did; the others were not sent "
            "(too few prompts) or waited in the engine's queue (eval.max_num_seqs, KV cache)"
        )
    # More than one token's time per accepted draft: no head can do that.
    if level.changes[THROUGHPUT.key].interval.low > level.acceptance_length - 1:
        noise = f"gains more than its acceptance length of {level.acceptance_length:.2f} allows"
        return f"{noise}, so the machine was not the same for both"
    return ""


def _prefix_hits(level: Level) -> str:
    """Hits in the prefix cache without and with the head, where they differ by a point or more."""
    before, after = (level.prefix_hits.get(name, np.nan) for name in (BASELINE, level.method))
    return f"; prefix-cache hits {before:.1%} → {after:.1%}" if abs(after - before) >= 0.01 else ""


def _failures(level: Level) -> str:
    return f"{level.failed} of {level.requests} requests failed"


def decide(
    levels: Sequence[Level], shares: dict[int, float], slo: SLOConfig | None = None, priced: Priced | None = None
) -> Verdict:
    """The decision for one workload, method and draft length.

    Args:
        levels: measured, of one workload, method and K.
        shares: requests in flight -> share of the time (TrafficConfig.shares).
        slo: the service level.
        priced: of that method: what it says of loads that were not run, which stay undecided.

    Raises:
        ValueError: none of the levels belongs to the traffic.
    """
    measured = {level.concurrency: level for level in levels}
    if not measured:
        raise ValueError("there is no level to judge; run: python eval/serving.py RECIPE")
    K = levels[0].K
    found = []
    for c in sorted(shares):
        if c in measured:
            found.append(judge(measured[c], slo))
        else:  # never deployed at: a model's price is no measurement
            model = priced.text(c, K) if priced else ""
            found.append(LevelVerdict(c, UNKNOWN, f"not run; add {c} to eval.concurrency{model}"))
    decision, up_to, reason, change = _overall(found, measured, shares)
    return Verdict(levels[0].workload, levels[0].method, K, decision, up_to, change, reason, tuple(found))


def _overall(
    found: list[LevelVerdict], measured: dict[int, Level], shares: dict[int, float]
) -> tuple[str, int | None, str, Change]:
    good = [v.concurrency for v in found if v.decision == DEPLOY]
    bad = [v.concurrency for v in found if v.decision == DO_NOT]
    reached = [measured[c] for c in shares if c in measured]
    reached = [level for level in reached if not _unfit(level)]
    change = _traffic_change(reached, shares)
    over_all = f"over the traffic {change_text(change)} output throughput"
    if not good:
        if bad:
            return DO_NOT, None, f"gains nowhere and loses {_at(bad)}; {over_all}", change
        return UNKNOWN, None, f"resolved nowhere; {over_all}", change
    largest = max((c for c in good if not any(b < c for b in bad)), default=None)
    if largest is None:
        if change.resolved and change.interval.value < 0:
            return DO_NOT, None, f"loses more {_at(bad)} than it gains {_at(good)}; {over_all}", change
        return UNKNOWN, None, f"gains {_at(good)} but loses {_at(bad)}; {over_all}", change
    unclear = [v.concurrency for v in found if v.decision == UNKNOWN]
    reason = f"gains {_at(good)}" + (f", loses {_at(bad)}" if bad else "")
    reason += f", unresolved {_at(unclear)}" if unclear else ""
    if largest == max(shares):
        return DEPLOY, None, f"{reason}; {over_all}", change
    below = _traffic_change([level for level in reached if level.concurrency <= largest], shares)
    return UP_TO, largest, f"{reason}; up to {largest} {change_text(below)} output throughput", below


def _at(loads: list[int]) -> str:
    return f"at concurrency {', '.join(map(str, loads))}"


def _traffic_change(levels: Sequence[Level], shares: dict[int, float]) -> Change:
    """Throughput over the mix, resampled by prompt; NaN where no level was reached."""
    if not levels:
        return Change(Interval(np.nan, np.nan, np.nan), resolved=False)

    def stacked(column: str) -> Array:  # (L, P)
        frame = pd.DataFrame({level.concurrency: level.paired[column] for level in levels})
        return frame.fillna(0.0).to_numpy(float).T

    weights = np.array([shares[level.concurrency] for level in levels])
    change = mixed_throughput_change(
        stacked("output_tokens_head"), stacked("share_s_head"), stacked("output_tokens_base"), stacked("share_s_base"),
        weights,
    )  # fmt: skip
    by_block = np.stack([level.by_block[THROUGHPUT.key] for level in levels])  # (L, B)
    return across_blocks(change, weights.sum() / (weights[:, None] / (1 + by_block)).sum(axis=0) - 1)


def change_text(change: Change) -> str:
    """A change with its interval in percent, and whether it says anything."""
    i = change.interval
    if np.isnan(i.value):
        return "unknown"
    text = f"{i.value:+.1%} [{i.low:+.1%}, {i.high:+.1%}]" if np.isfinite(i.low) else f"{i.value:+.1%} without interval"
    return text if change.resolved else f"{text} (unresolved)"
