"""From rows to the figures of the report, each with its interval; no IO and no formatting."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from drafthead.core.statistics import (
    Change,
    Interval,
    PositionAcceptance,
    acceptance_by_position,
    acceptance_length,
    acceptance_length_interval,
    acceptance_rate,
    length_difference,
    percentile,
    proportion_interval,
    statistic_change,
    throughput_change,
)
from drafthead.evaluation.acceptance import LOOPING_SHARE
from drafthead.evaluation.serving import HEAD
from drafthead.evaluation.workload import BASELINE, BASELINE_AGAIN

ALL = "all"


@dataclass(frozen=True)
class MethodAcceptance:
    """One method on one workload, over prompts whose baseline answer does not loop.

    Attributes:
        method, category: which; category "all" pools every prompt.
        prompts: how many.
        length: acceptance length, 1 + accepted / drafts.
        rate: accepted / proposed.
        tokens_per_step: output tokens per run of the target, steps without a draft included; below `length`
            for methods that often have nothing to propose.
        positions: acceptance at each draft position.
    """

    method: str
    category: str
    prompts: int
    length: Interval
    rate: float
    tokens_per_step: float
    positions: PositionAcceptance


@dataclass(frozen=True)
class AcceptanceSummary:
    """What the offline measurement says.

    Attributes:
        prompts: held-out prompts answered.
        looping: how many baseline answers repeat themselves and are left out of acceptance.
        ended: share of baseline answers that end by themselves.
        methods: one entry per method and workload, "all" first.
        identical: arm -> share of prompts answered exactly as by the baseline, looping ones included. The
            second baseline is the noise floor.
        head_minus_other: method -> acceptance length of the head minus that method's, paired by prompt.
    """

    prompts: int
    looping: int
    ended: float
    methods: list[MethodAcceptance]
    identical: dict[str, Interval]
    head_minus_other: dict[str, Interval]

    def of(self, method: str, category: str = ALL) -> MethodAcceptance:
        """The entry of a method on a workload."""
        return next(m for m in self.methods if (m.method, m.category) == (method, category))


@dataclass(frozen=True)
class Measure:
    """A figure of a level: how to name, scale and print it, and how to compute it from a pair's columns."""

    key: str
    label: str
    unit: str
    scale: float
    digits: int
    column: str = ""
    statistic: Callable[..., Any] = np.mean


THROUGHPUT = Measure("output_tokens_per_s", "Output throughput", "tok/s", 1, 1)
MEASURES = (
    THROUGHPUT,
    Measure("ttft_p50", "TTFT, median", "ms", 1e3, 1, "ttft_s", np.median),
    Measure("ttft_p95", "TTFT, P95", "ms", 1e3, 1, "ttft_s", percentile(95)),
    Measure("tpot_mean", "TPOT, mean", "ms", 1e3, 2, "tpot_s"),
    Measure("itl_mean", "ITL (per step), mean", "ms", 1e3, 2, "itl_s"),
    Measure("e2e_p50", "Latency, median", "ms", 1e3, 0, "e2e_s", np.median),
    Measure("e2e_p95", "Latency, P95", "ms", 1e3, 0, "e2e_s", percentile(95)),
)
MEASURE = {measure.key: measure for measure in MEASURES}


@dataclass(frozen=True)
class Level:
    """One concurrency, baseline beside head.

    Attributes:
        concurrency: as asked.
        achieved: arm -> requests in flight.
        reached: in both arms.
        pairs: prompts answered without error in both arms of every block.
        failed: requests that failed, both arms together.
        values: measure -> (baseline, head), in SI units.
        changes: measure -> relative change, positive = better.
        acceptance_length: under this load, from the server's counters.
    """

    concurrency: int
    achieved: dict[str, float]
    reached: bool
    pairs: int
    failed: int
    values: dict[str, tuple[float, float]]
    changes: dict[str, Change]
    acceptance_length: float


def summarise_acceptance(rows: pd.DataFrame) -> AcceptanceSummary:
    """Aggregate the rows of `read_acceptance`."""
    arms = {str(arm): group.set_index("prompt_id") for arm, group in rows.groupby("arm", sort=False)}
    baseline = arms[BASELINE]
    kept = baseline.index[baseline["repeated"] <= LOOPING_SHARE]
    methods = [arm for arm in arms if arm not in (BASELINE, BASELINE_AGAIN)]
    categories = [ALL, *sorted({*baseline["category"]} - {ALL})]
    return AcceptanceSummary(
        prompts=len(baseline),
        looping=len(baseline) - len(kept),
        ended=float((baseline["finish_reason"] == "stop").mean()),
        methods=[_method(m, c, arms[m].loc[kept]) for m in methods for c in categories],
        identical={arm: _identical(baseline, group) for arm, group in arms.items() if arm != BASELINE},
        head_minus_other={
            m: _difference(arms[HEAD].loc[kept], arms[m].loc[kept]) for m in methods if m != HEAD and HEAD in arms
        },
    )


def _method(method: str, category: str, rows: pd.DataFrame) -> MethodAcceptance:
    rows = rows if category == ALL else rows[rows["category"] == category]
    drafts, accepted = rows["drafts"], rows["accepted"]
    tokens = rows["num_tokens"]
    # A step yields its accepted drafts and one token more; drafts accepted beyond a stop are not output.
    steps = tokens - np.minimum(accepted, tokens - 1)
    return MethodAcceptance(
        method=method,
        category=category,
        prompts=len(rows),
        length=acceptance_length_interval(drafts, accepted),
        rate=acceptance_rate(rows["proposed"], accepted),
        tokens_per_step=float(tokens.sum() / steps.sum()) if len(rows) else np.nan,
        positions=acceptance_by_position(
            drafts, np.stack(list(rows["accepted_at"])) if len(rows) else np.zeros((0, 1))
        ),
    )


def _identical(baseline: pd.DataFrame, arm: pd.DataFrame) -> Interval:
    same = arm["output_sha256"].loc[baseline.index] == baseline["output_sha256"]
    return proportion_interval(int(same.sum()), len(same))


def _difference(head: pd.DataFrame, other: pd.DataFrame) -> Interval:
    return length_difference(head["drafts"], head["accepted"], other["drafts"], other["accepted"])


def summarise_serving(requests: pd.DataFrame, runs: pd.DataFrame) -> list[Level]:
    """Aggregate the rows of `read_requests` and `read_runs`, by concurrency."""
    return [
        _level(int(c), requests[requests["concurrency"] == c], runs[runs["concurrency"] == c])
        for c in sorted(runs["concurrency"].unique())
    ]


def _level(concurrency: int, requests: pd.DataFrame, runs: pd.DataFrame) -> Level:
    base, head = _paired_prompts(requests, runs)
    arms = {arm: runs[runs["arm"] == arm] for arm in (BASELINE, HEAD)}
    values, changes = {}, {}
    for measure in MEASURES:
        if measure is THROUGHPUT:
            values[measure.key] = (_throughput(arms[BASELINE]), _throughput(arms[HEAD]))
            changes[measure.key] = throughput_change(
                head["output_tokens"], head["share_s"], base["output_tokens"], base["share_s"]
            )
        else:
            pair = pd.DataFrame({"b": base[measure.column], "h": head[measure.column]}).dropna()
            values[measure.key] = (float(measure.statistic(pair["b"])), float(measure.statistic(pair["h"])))
            changes[measure.key] = statistic_change(pair["h"], pair["b"], measure.statistic)
    return Level(
        concurrency=concurrency,
        achieved={arm: float(rows["achieved"].mean()) for arm, rows in arms.items()},
        reached=bool(runs["reached"].all()),
        pairs=len(base),
        failed=int(runs["failed"].sum()),
        values=values,
        changes=changes,
        acceptance_length=acceptance_length(arms[HEAD]["drafts"], arms[HEAD]["accepted"]),
    )


def _throughput(runs: pd.DataFrame) -> float:
    return float(runs["output_tokens"].sum() / runs["duration_s"].sum())


def _paired_prompts(requests: pd.DataFrame, runs: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Baseline and head, one row per prompt answered everywhere: times averaged, tokens summed over blocks.

    `share_s` is a request's share of the wall time: latencies scaled so that they sum to the duration of
    their run. Then Σ tokens / Σ share_s is the throughput, and prompts can be resampled.
    """
    good = requests[requests["error"] == ""].copy()
    keys = ["arm", "block"]
    total = good.groupby(keys)["e2e_s"].transform("sum")
    duration = good.merge(runs[[*keys, "duration_s"]], on=keys)["duration_s"].to_numpy()
    good["share_s"] = good["e2e_s"] * duration / total
    answered = good.groupby("prompt_id").size()
    good = good[good["prompt_id"].isin(answered.index[answered == len(runs)])]
    times = {m.column: (m.column, "mean") for m in MEASURES if m.column}
    pooled = good.groupby(["arm", "prompt_id"]).agg(
        output_tokens=("output_tokens", "sum"), share_s=("share_s", "sum"), **times
    )
    return pd.DataFrame(pooled.xs(BASELINE, level="arm")), pd.DataFrame(pooled.xs(HEAD, level="arm"))
