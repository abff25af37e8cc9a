"""From rows to levels: one method beside the baseline at one load, every measure with its paired change.

Rows are those of `evaluation.columns`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from scipy.stats import gmean

from drafthead.data.responses import LOOP_LIMIT
from drafthead.evaluation.columns import SETTING, LevelKey, level_key, read_rows
from drafthead.evaluation.comparison import across_blocks, statistic_change, throughput_change
from drafthead.evaluation.workload import BASELINE
from drafthead.statistics import (
    FEWEST_PROMPTS,
    Array,
    Change,
    Interval,
    acceptance_length,
    acceptance_length_interval,
    ratio_interval,
    ratio_of_sums,
)

_LEVEL = [*SETTING, "load"]


class ServingRows(NamedTuple):
    """Rows of requests and of runs, as `completed` gives them."""

    requests: pd.DataFrame
    runs: pd.DataFrame


def read_serving(directory: Path) -> ServingRows:
    """The rows of a serving artifact, see `completed`."""
    return completed(read_rows(directory, "requests-*.parquet"), read_rows(directory, "runs-*.parquet"))


def completed(requests: pd.DataFrame, runs: pd.DataFrame) -> ServingRows:
    """The rows of whole ABBA designs.

    Those of a server that failed in one of the blocks are left out: half of an ABBA design has the machine's drift in
    it. `accepted_by_step` is emptied where acceptance means little: on random tokens, and where the baseline's response
    to that prompt under that load loops.
    """
    server, blocks = ["method", "k", "tensor_parallel"], runs["block"].nunique()
    requests, runs = (
        rows[rows.groupby(server)["block"].transform("nunique") == blocks].assign(
            total_tokens=rows["output_tokens"] + rows["prompt_tokens"]
        )
        for rows in (requests, runs)
    )
    prompts = requests.set_index([*_LEVEL, "prompt_id"]).index
    looping = prompts[(requests["method"] == BASELINE) & (requests["repeated"] > LOOP_LIMIT)]
    meaningless = prompts.isin(looping) | requests["throughput_only"].to_numpy(bool)
    steps = zip(meaningless, requests["accepted_by_step"], strict=True)
    requests["accepted_by_step"] = [[] if left_out else accepted for left_out, accepted in steps]
    requests["drafts"], requests["accepted"] = (requests["accepted_by_step"].map(of) for of in (len, np.sum))
    requests["itl_answer_s"] = (requests["e2e_s"] - requests["ttfot_s"]) / (requests["output_tokens"] - 1)
    runs["running"] = runs["running"].fillna(runs["achieved"])  # of a server that does not say
    runs["responses"] = runs["requests"] - runs["failed"]
    return ServingRows(requests, runs)


def steady(rows: ServingRows) -> ServingRows:
    """The rows of the first setting at loads whose places were filled as they became free.

    Only they say what a step of b requests costs.
    """
    first = rows.runs[SETTING].iloc[0]
    return ServingRows(*(f[(f[SETTING] == first).all(axis=1) & np.isinf(f["request_rate"])] for f in rows))


@dataclass(frozen=True)
class Measure:
    """A figure of a level: how to name, scale and print it, and how to compute it.

    Attributes:
        column: of the requests' times; of what is counted per second, where `rate`.
        statistic: over requests; unused by rates.
    """

    key: str
    label: str
    unit: str
    scale: float
    digits: int
    column: str
    statistic: Callable[..., Any] = np.mean
    rate: bool = False

    @property
    def title(self) -> str:
        """The label with its unit."""
        return f"{self.label} ({self.unit})"

    def text(self, value: float) -> str:
        """A value in SI units, in the measure's unit."""
        return f"{value * self.scale:.{self.digits}f}" if np.isfinite(value) else "–"


THROUGHPUT = Measure("output_tokens_per_s", "Output throughput", "tok/s", 1, 1, "output_tokens", rate=True)
_RATES = (
    THROUGHPUT,
    Measure("total_tokens_per_s", "Total throughput", "tok/s", 1, 1, "total_tokens", rate=True),
    Measure("requests_per_s", "Requests", "1/s", 1, 3, "responses", rate=True),
)
# The formulas are those of columns.FORMULAS.
_TIMES = {
    "ttft": ("TTFT", 1), "ttfot": ("TTFOT", 1), "tpot": ("TPOT", 2), "itl": ("ITL (per step)", 2),
    "itl_answer": ("ITL of the answer", 2), "tpot_all": ("TPOT with the first token", 2), "e2e": ("Latency", 0),
}  # fmt: skip
_STATISTICS: dict[str, tuple[str, Callable[..., Any]]] = {
    "mean": ("mean", np.mean), "p50": ("median", np.median),
    "p95": ("P95", partial(np.percentile, q=95)), "p99": ("P99", partial(np.percentile, q=99)),
}  # fmt: skip
MEASURE = {measure.key: measure for measure in _RATES} | {
    f"{time}_{name}": Measure(f"{time}_{name}", f"{label}, {word}", "ms", 1e3, digits, f"{time}_s", statistic)
    for time, (label, digits) in _TIMES.items()
    for name, (word, statistic) in _STATISTICS.items()
}
MEASURES = (THROUGHPUT.key, "ttft_p50", "ttft_p95", "tpot_mean", "tpot_p95", "itl_mean", "e2e_p50", "e2e_p95")


@dataclass(frozen=True)
class LoadComparison:
    """One method at one draft length and one load, beside the baseline at that load.

    Attributes:
        key: which measurement, of the method.
        running: "none" and the method -> requests running in the engine.
        reached: in both.
        requests, failed: sent, and how many of them failed, both methods together.
        values: measure -> (baseline, method), in SI units.
        changes: measure -> relative change, positive = better, of a time a TimeChange; with several blocks, what they
            differ by is in it.
        by_block: measure -> the change in each block alone, as a fraction.
        acceptance_length: under this load, over the prompts of `paired` less those where it means little (`completed`);
            NaN without drafts or where the server does not say.
        length_of_all: of every response, from the server's counters.
        paired: one row per prompt answered without error in both methods of every block, in the order of sending:
            output_tokens, drafts, accepted, share_s and, as a list over blocks, the times of the baseline (suffix
            _base) and the method (suffix _head).
        prefix_hits: "none" and the method -> share of prompt tokens found in the prefix cache; NaN: not counted.
        tokens_per_request: output tokens, mean of both methods.
        response_length: mean output tokens of the baseline's responses and the method's, over `paired`.
        longer_by: the difference of the two in tokens, paired by prompt; no bounds with fewer prompts than an interval
            needs.
        contradicted_by: what the workloads that this level mixes change by alone, put together, where the level itself
            changes by something else; see `drafthead.evaluation.decision.analysis.held_to_workloads`.
    """

    key: LevelKey
    running: dict[str, float]
    reached: bool
    requests: int
    failed: int
    values: dict[str, tuple[float, float]]
    changes: dict[str, Change]
    by_block: dict[str, Array]
    acceptance_length: Interval
    length_of_all: float
    paired: pd.DataFrame
    prefix_hits: dict[str, float]
    tokens_per_request: float
    response_length: tuple[float, float]
    longer_by: Interval
    contradicted_by: Change | None = None

    def change(self, measure: Measure) -> float:
        """The change of a measure as a fraction."""
        return self.changes[measure.key].value

    @property
    def length_differs(self) -> bool:
        """Whether responses are longer or shorter than the baseline's by more than chance."""
        return self.longer_by.low > 0 or self.longer_by.high < 0


class GeometricMean(NamedTuple):
    """A measure over all steady levels of a method, with the worst level beside it.

    Attributes:
        values: geometric means of baseline and method, in SI units.
        change: of the two, without bounds.
        worst: the level with the smallest change.
        sign: 1 where every level is resolved as better, -1 where every one as worse, 0 otherwise.
    """

    measure: Measure
    values: list[float]
    change: Change
    worst: LoadComparison
    sign: int


def summarise_serving(rows: ServingRows, measures: Sequence[str] = MEASURES) -> list[LoadComparison]:
    """Every method and draft length at every load that the baseline was measured at too.

    Workloads stay in the order in which they were measured, all prompts first.
    """
    levels = []
    requests = dict(iter(rows.requests.groupby(_LEVEL, sort=False)))
    for key, runs in rows.runs.groupby(_LEVEL, sort=False):
        drafted = runs[runs["method"] != BASELINE]
        if len(drafted) == len(runs):
            continue
        for method, K in dict.fromkeys(zip(drafted["method"], drafted["k"], strict=True)):
            both = [
                frame[(frame["method"] == BASELINE) | ((frame["method"] == method) & (frame["k"] == K))]
                for frame in (requests[key], runs)
            ]
            levels.append(_level(str(method), measures, *both))
    order = list(dict.fromkeys(level.key.setting for level in levels))
    return sorted(levels, key=lambda x: (order.index(x.key.setting), x.key.method, x.key.K, x.key.concurrency))


def grouped(levels: Iterable[LoadComparison], *keys: str) -> dict[tuple, list[LoadComparison]]:
    """Levels by the values of some attributes of their keys, in the order of the levels."""
    found: dict[tuple, list[LoadComparison]] = {}
    for level in levels:
        found.setdefault(tuple(getattr(level.key, key) for key in keys), []).append(level)
    return found


def cost_per_million(price_per_gpu_hour: float, gpus: int, tokens_per_s: float) -> float:
    """Price of 10⁶ tokens: price per GPU and hour × GPUs / tokens per hour, in the currency of the price."""
    return price_per_gpu_hour * gpus / (3600 * tokens_per_s) * 1e6


def geometric_means(levels: Sequence[LoadComparison], *, only_reached: bool = True) -> list[GeometricMean]:
    """Every measure over the steady levels; empty when there are fewer than two.

    Args:
        levels: of one workload, method and K.
        only_reached: leave out loads that were not; published means do not.
    """
    chosen = [level for level in levels if level.key.steady and (level.reached or not only_reached)]
    found = []
    for measure in (MEASURE[key] for key in (chosen[0].values if len(chosen) > 1 else ())):
        values = [gmean([level.values[measure.key][side] for level in chosen]) for side in (0, 1)]
        mean = float(gmean([1 + level.change(measure) for level in chosen])) - 1
        change = type(chosen[0].changes[measure.key])(mean, np.nan, np.nan)
        worst = min(chosen, key=lambda level: level.change(measure))
        signs = {int(np.sign(x.change(measure))) if x.changes[measure.key].resolved else 0 for x in chosen}
        found.append(GeometricMean(measure, values, change, worst, signs.pop() if len(signs) == 1 else 0))
    return found


@np.errstate(invalid="ignore", divide="ignore")  # a response in one chunk takes no time per token
def _level(method: str, measures: Sequence[str], requests: pd.DataFrame, runs: pd.DataFrame) -> LoadComparison:
    key = level_key(runs[runs["method"] == method].iloc[0])
    base, head = _paired_prompts(requests, runs, method)
    blocks = [
        _paired_prompts(requests[requests["block"] == b], runs[runs["block"] == b], method)
        for b in sorted({*runs["block"]})
    ]
    # A run's share of its wall time is all of it.
    methods = {name: runs[runs["method"] == name].assign(share_s=runs["duration_s"]) for name in (BASELINE, method)}
    values, changes, by_block = {}, {}, {}
    for name in measures:
        measure = MEASURE[name]
        b, h = np.array([_over_prompts(measure, *block) for block in blocks]).T
        by_block[name] = (h / b if measure.rate else b / h) - 1
        values[name] = _over_prompts(measure, *(methods.values() if measure.rate else (base, head)))
        if measure.rate:
            change = throughput_change(head[measure.column], head["share_s"], base[measure.column], base["share_s"])
        else:
            change = statistic_change(*_pair(measure, head, base), measure.statistic, waves=key.concurrency)
        changes[name] = across_blocks(change, by_block[name])
    drafted, counted = head[head["drafts"] > 0], methods[method]
    lengths = [(rows["output_tokens"] / rows["responses"]).to_numpy(float) for rows in (base, head)]
    each = np.ones(len(base))
    longer_by = ratio_interval(lengths[1] - lengths[0], each)
    return LoadComparison(
        key,
        running={name: float(rows["running"].mean()) for name, rows in methods.items()},
        reached=bool(runs["reached"].all()),
        requests=int(runs["requests"].sum()),
        failed=int(runs["failed"].sum()),
        values=values,
        changes=changes,
        by_block=by_block,
        acceptance_length=acceptance_length_interval(drafted["drafts"], drafted["accepted"]),
        length_of_all=acceptance_length(counted["drafts"], counted["accepted"]),
        paired=base.join(head, lsuffix="_base", rsuffix="_head"),
        prefix_hits={
            name: float(ratio_of_sums(rows["prefix_hits"], rows["prefix_queries"])) for name, rows in methods.items()
        },
        tokens_per_request=float(ratio_of_sums(runs["output_tokens"], runs["responses"])),
        response_length=(float(ratio_of_sums(lengths[0], each)), float(ratio_of_sums(lengths[1], each))),
        longer_by=longer_by if len(each) >= FEWEST_PROMPTS else Interval(longer_by.value, np.nan, np.nan),
    )


def _pair(measure: Measure, one: pd.DataFrame, other: pd.DataFrame) -> tuple[Array, Array]:
    """(P, B) of both methods, of the prompts that have a measure everywhere: one token has no time per token."""
    pair = [np.array(rows[measure.column].tolist(), float, ndmin=2) for rows in (one, other)]
    timed = np.isfinite(pair).all(axis=(0, 2))
    return pair[0][timed], pair[1][timed]


def _over_prompts(measure: Measure, base: pd.DataFrame, head: pd.DataFrame) -> tuple[float, float]:
    """A measure of both methods over requests of shared prompts, or over their runs, in SI units; NaN: none has it."""
    if measure.rate:
        found: list[Any] = [ratio_of_sums(rows[measure.column], rows["share_s"]) for rows in (base, head)]
    else:
        found = [measure.statistic(times.ravel()) if times.size else np.nan for times in _pair(measure, base, head)]
    return float(found[0]), float(found[1])


def _paired_prompts(requests: pd.DataFrame, runs: pd.DataFrame, method: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Baseline and method, one row per prompt answered everywhere: times listed, tokens summed over blocks.

    `share_s` is a request's share of the wall time: latencies scaled so that they sum to the duration of
    their run. Then Σ tokens / Σ share_s is the throughput, and prompts can be resampled. Rows are in the order in
    which the requests were sent, so that those that wait together stand together.
    """
    good = requests[requests["error"] == ""].copy()
    keys = ["method", "block"]
    total = good.groupby(keys)["e2e_s"].transform("sum")
    duration = good.merge(runs[[*keys, "duration_s"]], on=keys)["duration_s"].to_numpy()
    good["share_s"] = good["e2e_s"] * duration / total
    answered = good.groupby("prompt_id").size()
    good = good[good["prompt_id"].isin(answered.index[answered == len(runs)])]
    times = {f"{time}_s": (f"{time}_s", list) for time in _TIMES}
    pooled = good.groupby(["method", "prompt_id"]).agg(
        output_tokens=("output_tokens", "sum"),
        total_tokens=("total_tokens", "sum"),
        responses=("error", "size"),
        drafts=("drafts", "sum"),
        accepted=("accepted", "sum"),
        share_s=("share_s", "sum"),
        sent=("start_s", "mean"),
        **times,
    )
    base, other = (
        pd.DataFrame(pooled[pooled.index.get_level_values("method") == name].droplevel("method"))
        for name in (BASELINE, method)
    )
    order = base.sort_values("sent", kind="stable").index
    return base.loc[order], other.loc[order]
