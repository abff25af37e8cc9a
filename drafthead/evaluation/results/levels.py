"""From rows to levels: one method beside the baseline at one load, every measure with its paired change; no formatting."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from drafthead.evaluation.comparison import Change, across_blocks, percentile, statistic_change, throughput_change
from drafthead.statistics import Array, acceptance_length, geometric_mean
from drafthead.evaluation.results.serving_rows import LEVEL_KEYS, ServingRows, methods_of
from drafthead.evaluation.workload import BASELINE


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
    Measure("tpot_p95", "TPOT, P95", "ms", 1e3, 2, "tpot_s", percentile(95)),
    Measure("itl_mean", "ITL (per step), mean", "ms", 1e3, 2, "itl_s"),
    Measure("e2e_p50", "Latency, median", "ms", 1e3, 0, "e2e_s", np.median),
    Measure("e2e_p95", "Latency, P95", "ms", 1e3, 0, "e2e_s", percentile(95)),
)
MEASURE = {measure.key: measure for measure in MEASURES}


@dataclass(frozen=True)
class Level:
    """One method at one draft length and one load, beside the baseline at that load.

    Attributes:
        workload, load, concurrency, method, K: which.
        running: "none" and the method -> requests running in the engine.
        reached: in both.
        pairs: prompts answered without error in both methods of every block.
        requests, failed: sent, and how many of them failed, both methods together.
        values: measure -> (baseline, method), in SI units.
        changes: measure -> relative change, positive = better; with several blocks, what they differ by is in it.
        by_block: measure -> the change in each block alone, as a fraction.
        acceptance_length: under this load, from the server's counters; NaN without drafts or on random tokens.
        paired: (pairs,) one row per prompt_id in the order of sending: output_tokens, share_s and the times of the
            baseline (suffix _base) and the method (suffix _head).
        prefix_hits: "none" and the method -> share of prompt tokens found in the prefix cache; NaN: not counted.
        gpus: of each server; None where the rows leave it to the recipe.
        tokens_per_request: output tokens, mean of both methods.
    """

    workload: str
    load: str
    concurrency: int
    method: str
    K: int
    running: dict[str, float]
    reached: bool
    pairs: int
    requests: int
    failed: int
    values: dict[str, tuple[float, float]]
    changes: dict[str, Change]
    by_block: dict[str, Array]
    acceptance_length: float
    paired: pd.DataFrame
    prefix_hits: dict[str, float] = field(default_factory=dict)
    gpus: int | None = None
    tokens_per_request: float = np.nan

    @property
    def steady(self) -> bool:
        """Whether places were filled as they became free: what is decided is decided on such loads.

        At a request rate as many tokens come out as are asked for, whoever serves; only times tell methods apart.
        """
        return self.load == f"c{self.concurrency}"

    def change(self, measure: Measure) -> float:
        """The change of a measure as a fraction."""
        return self.changes[measure.key].interval.value


@dataclass(frozen=True)
class GeometricMean:
    """A measure over all reached steady levels of a method, with the worst level beside it.

    Attributes:
        values: geometric means of baseline and method, in SI units.
        change: of the two, positive = better.
        worst: the level with the smallest change.
        levels, better, worse: how many levels, and how many are resolved either way.
    """

    measure: Measure
    values: tuple[float, float]
    change: float
    worst: Level
    levels: int
    better: int
    worse: int


def summarise_serving(rows: ServingRows) -> list[Level]:
    """Every method and draft length at every load that the baseline was measured at too."""
    levels = []
    for key, runs in rows.runs.groupby(LEVEL_KEYS, sort=False):
        requests = rows.requests[(rows.requests[LEVEL_KEYS] == list(key)).all(axis=1)]
        if BASELINE not in set(runs["arm"]):
            continue
        for method, K in methods_of(runs):
            chosen = [_chosen(frame, method, K) for frame in (requests, runs)]
            levels.append(_level(key, method, K, *chosen))
    return sorted(levels, key=lambda level: (level.workload, level.method, level.K, level.concurrency))


def geometric_means(levels: Sequence[Level]) -> list[GeometricMean]:
    """Every measure over the steady levels that were reached; empty when there are fewer than two."""
    reached = [level for level in levels if level.reached and level.steady]
    return [_geometric_mean(measure, reached) for measure in MEASURES] if len(reached) > 1 else []


def _geometric_mean(measure: Measure, levels: Sequence[Level]) -> GeometricMean:
    baseline, method = (geometric_mean([level.values[measure.key][i] for level in levels]) for i in (0, 1))
    resolved = [level.change(measure) for level in levels if level.changes[measure.key].resolved]
    return GeometricMean(
        measure, (baseline, method), geometric_mean([1 + level.change(measure) for level in levels]) - 1,
        min(levels, key=lambda level: level.change(measure)),
        len(levels), sum(c > 0 for c in resolved), sum(c < 0 for c in resolved),
    )  # fmt: skip


def _chosen(frame: pd.DataFrame, method: str, K: int) -> pd.DataFrame:
    return frame[(frame["arm"] == BASELINE) | ((frame["arm"] == method) & (frame["k"] == K))]


def _level(key: Any, method: str, K: int, requests: pd.DataFrame, runs: pd.DataFrame) -> Level:
    workload, load, concurrency = str(key[0]), str(key[1]), int(key[2])
    base, head = _paired_prompts(requests, runs, method)
    blocks = [
        _paired_prompts(requests[requests["block"] == b], runs[runs["block"] == b], method) for b in sorted({*runs["block"]})
    ]
    methods = {name: runs[runs["arm"] == name] for name in (BASELINE, method)}
    values, changes, by_block = {}, {}, {}
    for measure in MEASURES:
        alone = by_block[measure.key] = np.array([_change_of(measure, *block) for block in blocks])
        if measure is THROUGHPUT:
            values[measure.key] = (_throughput(methods[BASELINE]), _throughput(methods[method]))
            change = throughput_change(
                head["output_tokens"], head["share_s"], base["output_tokens"], base["share_s"]
            )
        else:
            pair = _pair(measure, base, head)
            values[measure.key] = (_statistic(measure, pair["b"]), _statistic(measure, pair["h"]))
            change = statistic_change(pair["h"], pair["b"], measure.statistic, waves=concurrency)
        changes[measure.key] = across_blocks(change, alone)
    return Level(
        workload, load, concurrency, method, K,
        running={name: float(rows["running"].mean()) for name, rows in methods.items()},
        reached=bool(runs["reached"].all()),
        pairs=len(base),
        requests=int(runs["requests"].sum()),
        failed=int(runs["failed"].sum()),
        values=values,
        changes=changes,
        by_block=by_block,
        acceptance_length=_acceptance_length(methods[method]),
        paired=base.join(head, lsuffix="_base", rsuffix="_head"),
        prefix_hits={name: _hits(rows) for name, rows in methods.items()},
        gpus=int(runs["tensor_parallel"].iloc[0]) if "tensor_parallel" in runs else None,
        tokens_per_request=float(runs["output_tokens"].sum() / (runs["requests"] - runs["failed"]).sum()),
    )  # fmt: skip


def _pair(measure: Measure, base: pd.DataFrame, head: pd.DataFrame) -> pd.DataFrame:
    """A measure of every request that has it in both methods; a response of one token has no time per token."""
    return pd.DataFrame({"b": base[measure.column], "h": head[measure.column]}).dropna()


def _statistic(measure: Measure, values: pd.Series) -> float:
    return float(measure.statistic(values)) if len(values) else np.nan


def _change_of(measure: Measure, base: pd.DataFrame, head: pd.DataFrame) -> float:
    """The change alone, as a fraction; positive is better."""
    if measure is THROUGHPUT:
        rates = [f["output_tokens"].sum() / f["share_s"].sum() if len(f) else np.nan for f in (head, base)]
        return float(rates[0] / rates[1] - 1)
    pair = _pair(measure, base, head)
    return _statistic(measure, pair["b"]) / _statistic(measure, pair["h"]) - 1


def _acceptance_length(runs: pd.DataFrame) -> float:
    if "throughput_only" in runs and runs["throughput_only"].any():  # random tokens: accepted or not, it means nothing
        return np.nan
    return acceptance_length(runs["drafts"], runs["accepted"])


def _hits(runs: pd.DataFrame) -> float:
    queries = runs["prefix_queries"].sum() if "prefix_queries" in runs else 0
    return float(runs["prefix_hits"].sum() / queries) if queries else np.nan


def _throughput(runs: pd.DataFrame) -> float:
    return float(runs["output_tokens"].sum() / runs["duration_s"].sum())


def _paired_prompts(requests: pd.DataFrame, runs: pd.DataFrame, method: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Baseline and method, one row per prompt answered everywhere: times averaged, tokens summed over blocks.

    `share_s` is a request's share of the wall time: latencies scaled so that they sum to the duration of
    their run. Then Σ tokens / Σ share_s is the throughput, and prompts can be resampled. Rows are in the order in
    which the requests were sent, so that those that wait together stand together.
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
        output_tokens=("output_tokens", "sum"), share_s=("share_s", "sum"), sent=("start_s", "mean"), **times
    )
    base, other = (
        pd.DataFrame(pooled[pooled.index.get_level_values("arm") == name].droplevel("arm")) for name in (BASELINE, method)
    )
    order = base.sort_values("sent", kind="stable").index
    return base.loc[order], other.loc[order]
