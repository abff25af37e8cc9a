"""Does a schedule of draft lengths beat the best fixed one? Served and measured, not priced.

The cost model fills in the schedule from a measurement of fixed draft lengths; then vLLM serves that schedule beside
the same lengths, in blocks of opposite order and with the same prompts at every load. At a single load a schedule can
at best equal the length that is best there: what it gains, it gains over a traffic of several loads. The best fixed
length is picked by the same measurement, which favours it a little.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from drafthead.config import Recipe
from drafthead.config.evaluation import OWN, MethodConfig
from drafthead.evaluation.comparison import Change, across_blocks, mixed_throughput_change, throughput_change
from drafthead.evaluation.decision.cost_model import fit
from drafthead.evaluation.decision.deployment import deployed_config, speculative_flag
from drafthead.evaluation.decision.schedule import KEY, Schedule, best_schedule
from drafthead.evaluation.decision.speed import speed_samples
from drafthead.evaluation.decision.verdict import change_text
from drafthead.evaluation.measuring.plan import recipe_plan
from drafthead.evaluation.measuring.serving import measure_serving
from drafthead.evaluation.reporting.tables import Cell, Table, change_cell, table
from drafthead.evaluation.results.levels import THROUGHPUT, Level, summarise_serving
from drafthead.evaluation.results.serving_rows import read_serving
from drafthead.evaluation.workload import HEAD
from drafthead.statistics import Array

SCHEDULED = "schedule"
BLOCKS = 2  # A B, B A: at the least


@dataclass(frozen=True)
class ScheduleCheck:
    """What came out.

    Attributes:
        table: every load and the traffic, fixed lengths and the schedule.
        best: the fixed draft length that serves the traffic fastest.
        change: output throughput of the schedule over the traffic, against that length; the interval holds what
            blocks differ by.
        by_block: the same as a fraction, block by block.
    """

    table: Table
    best: int
    change: Change
    by_block: tuple[float, ...]

    def sentence(self) -> str:
        """For the terminal."""
        against = f"against K = {self.best}, the best fixed draft length of this traffic"
        blocks = ", ".join(f"{change:+.1%}" for change in self.by_block)
        apart = f" Server starts apart: {blocks}." if len(self.by_block) > 1 else ""
        return f"The schedule: {change_text(self.change)} output throughput {against}.{apart}"


def modelled_schedule(recipe: Recipe) -> Schedule:
    """Measure the recipe's fixed draft lengths, and let the cost model fill in a schedule.

    Raises:
        ValueError: a single draft length or load, from which no schedule follows.
    """
    settings = recipe.eval
    if len(settings.draft_tokens) < 2 or len(settings.concurrency) < 2:
        raise ValueError(
            f"a schedule chooses between draft lengths by load: eval.num_draft_tokens {list(settings.draft_tokens)} "
            f"and eval.concurrency {list(settings.concurrency)} need two values each, such as [3,1] and [1,32]"
        )
    fixed = recipe.model_copy(update={"eval": settings.model_copy(update={"served": (HEAD,), "loads": ()})})
    directory = measure_serving(fixed, recipe_plan(fixed), _directory(recipe) / "fixed")
    samples = speed_samples(read_serving(directory), HEAD, recipe.engine.max_num_seqs)
    return best_schedule(fit(samples.points(), samples.positions), recipe.engine.max_num_seqs)


def settled(recipe: Recipe, schedule: Schedule) -> str:
    """What to do where the cost model has one draft length for every batch; empty where it has several."""
    if len(schedule) > 1:
        return ""
    ((_, last, K),) = schedule
    if K == 0:
        return f"K = 0 at every load: drafting pays at no batch of 1 to {last} requests; serve without the head."
    flag = speculative_flag(deployed_config(recipe, HEAD, K))
    return (
        f"K = {K} at every load: no other draft length is faster by a per cent at any batch of 1 to {last} requests. "
        f"There is no schedule to serve; start it with\n  {flag}"
    )


def measure_schedule(recipe: Recipe, schedule: Schedule) -> Path:
    """Serve the schedule beside every fixed draft length; returns the artifact's directory.

    Raises:
        ValueError: the schedule has one draft length, or one beyond the recipe's.
    """
    lengths = {K for _, _, K in schedule}
    longest = max(recipe.eval.draft_tokens)
    if len(lengths) == 1 or max(lengths) > longest:
        raise ValueError(
            f"schedule {schedule}: nothing to compare with a single draft length, and none may be above "
            f"{longest}, the longest of eval.num_draft_tokens; give another with --schedule '[[1,2,3],[3,64,1]]'"
        )
    method = MethodConfig(name=SCHEDULED, method=OWN, num_draft_tokens=longest, extra={KEY: schedule})  # type: ignore[arg-type]
    settings = recipe.eval.model_copy(
        update={
            "methods": (*(own for own in recipe.eval.methods if own.name != SCHEDULED), method),
            "served": (HEAD, SCHEDULED),
            "loads": (),
            "repeats": max(BLOCKS, recipe.eval.repeats),
        }
    )
    beside = recipe.model_copy(update={"eval": settings})
    return measure_serving(beside, recipe_plan(beside), _directory(recipe) / "schedule")


def _directory(recipe: Recipe) -> Path:
    return recipe.results_dir / "draft-lengths"


def check_schedule(recipe: Recipe, directory: Path) -> ScheduleCheck:
    """Compare what `measure_schedule` left, over the recipe's traffic."""
    levels = summarise_serving(read_serving(directory))
    return compare(levels, recipe.eval.traffic.shares(tuple(sorted({level.concurrency for level in levels}))))


def compare(levels: Sequence[Level], shares: dict[int, float]) -> ScheduleCheck:
    """The schedule against every fixed draft length.

    Args:
        levels: of the head at fixed lengths and of the schedule, at loads of fixed concurrency.
        shares: requests in flight -> share of the baseline's time.
    """
    ours = _of(levels, SCHEDULED)
    fixed: dict[int, dict[int, Level]] = {}
    for level in levels:
        if level.method == HEAD and level.concurrency in ours:
            fixed.setdefault(level.K, {})[level.concurrency] = level
    weights = {c: shares[c] for c in sorted(ours) if c in shares}
    best = max(fixed, key=lambda K: _gain(fixed[K], weights))
    change, apart = _over_traffic(ours, fixed[best], weights), _apart(ours, fixed[best], weights)

    def row(
        load: str, share: float, gain: Callable[[dict[int, Level]], float], K: int, against: Cell
    ) -> dict[str, Any]:
        gains = {f"K = {K} (%)": _percent(gain(of)) for K, of in fixed.items()} | {"Schedule (%)": _percent(gain(ours))}
        ends = {"Best fixed": Cell(f"K = {K}"), "Schedule against it (%)": against}
        return {"Concurrency": load, "Share": Cell(f"{share:.0%}")} | gains | ends

    rows = []
    for c in weights:
        fastest = max(fixed, key=lambda K: fixed[K][c].change(THROUGHPUT))
        reached = ours[c].reached and fixed[fastest][c].reached
        against = change_cell(_at_load(ours[c], fixed[fastest][c]), reached)
        rows.append(row(str(c), weights[c], lambda of: of[c].change(THROUGHPUT), fastest, against))  # noqa: B023
    rows.append(row("the traffic", 1.0, lambda of: _gain(of, weights), best, change_cell(change)))
    note = (
        "Output throughput against no speculation, and of the schedule against the best fixed draft length; brackets: "
        "95 % paired bootstrap over prompts, with what differs between blocks of server starts. Grey: the interval "
        "includes zero, or there is none."
    )
    return ScheduleCheck(table("A schedule of draft lengths beside fixed ones", rows, note), best, change, apart)


def _percent(change: float) -> Cell:
    return Cell(f"{100 * change:+.1f}")


def _gain(levels: dict[int, Level], weights: dict[int, float]) -> float:
    """Change of throughput over the traffic against no speculation, as a fraction."""
    return _mixed({c: levels[c].change(THROUGHPUT) for c in weights}, weights)


def _mixed(changes: dict[int, float], weights: dict[int, float]) -> float:
    """1 / Σ share / speedup − 1."""
    time = sum(share / (1 + changes[c]) for c, share in weights.items())
    return sum(weights.values()) / time - 1


def _of(levels: Sequence[Level], method: str) -> dict[int, Level]:
    return {level.concurrency: level for level in levels if level.method == method}


def _at_load(schedule: Level, fixed: Level) -> Change:
    both = _joined(schedule, fixed)
    change = throughput_change(
        both["output_tokens"], both["share_s"], both["output_tokens_fixed"], both["share_s_fixed"]
    )
    return across_blocks(change, (1 + _by_block(schedule)) / (1 + _by_block(fixed)) - 1)


def _over_traffic(schedule: dict[int, Level], fixed: dict[int, Level], weights: dict[int, float]) -> Change:
    frames = {c: _joined(schedule[c], fixed[c]) for c in weights}

    def stacked(column: str) -> pd.DataFrame:  # (L, P)
        return pd.DataFrame({c: frame[column] for c, frame in frames.items()}).fillna(0.0).T

    # What the fixed length spends at each load, where the baseline spends the traffic's share.
    spent = [share / (1 + fixed[c].change(THROUGHPUT)) for c, share in weights.items()]
    change = mixed_throughput_change(
        stacked("output_tokens"), stacked("share_s"), stacked("output_tokens_fixed"), stacked("share_s_fixed"), spent
    )
    return across_blocks(change, _apart(schedule, fixed, weights))


def _apart(schedule: dict[int, Level], fixed: dict[int, Level], weights: dict[int, float]) -> tuple[float, ...]:
    """Change of throughput over the traffic from the fixed length to the schedule, in each block alone."""
    by_block = [[_mixed(own, weights) for own in _blocks(levels, weights)] for levels in (schedule, fixed)]
    return tuple((1 + ours) / (1 + theirs) - 1 for ours, theirs in zip(*by_block, strict=True))


def _blocks(levels: dict[int, Level], weights: dict[int, float]) -> list[dict[int, float]]:
    """Load -> change against no speculation, for every block."""
    return [dict(zip(weights, own, strict=True)) for own in zip(*(_by_block(levels[c]) for c in weights), strict=True)]


def _by_block(level: Level) -> Array:
    return level.by_block[THROUGHPUT.key]


def _joined(schedule: Level, fixed: Level) -> pd.DataFrame:
    """One row per prompt answered by both."""
    columns = {"output_tokens_head": "output_tokens", "share_s_head": "share_s"}
    frames = [level.paired[list(columns)].rename(columns=columns) for level in (schedule, fixed)]
    return frames[0].join(frames[1], rsuffix="_fixed", how="inner")
