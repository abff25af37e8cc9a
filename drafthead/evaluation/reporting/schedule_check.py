"""Does a schedule of draft lengths beat the best fixed one? Served and measured, not priced.

The cost model fills in the schedule from a measurement of fixed draft lengths; then vLLM serves that schedule beside
the same lengths, in blocks of opposite order and with the same prompts at every load. At a single load a schedule can
at best equal the length that is best there: what it gains, it gains over a traffic of several loads. The best fixed
length is picked by the same measurement, which favours it a little.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from drafthead.config import Recipe
from drafthead.config.evaluation import ArmConfig
from drafthead.core.comparison import Change, mixed_throughput_change, throughput_change
from drafthead.evaluation.decision.cost_fit import fit
from drafthead.evaluation.decision.schedule import KEY, Schedule, best_schedule
from drafthead.evaluation.decision.speed import speed_samples
from drafthead.evaluation.decision.verdict import change_text
from drafthead.evaluation.measuring.plan import recipe_plan
from drafthead.evaluation.measuring.serving import measure_serving
from drafthead.evaluation.reporting.tables import Cell, Table, change_cell
from drafthead.evaluation.results.levels import THROUGHPUT, Level, summarise_serving
from drafthead.evaluation.results.serving_rows import ServingRows, read_serving
from drafthead.evaluation.workload import HEAD

ARM = "schedule"
BLOCKS = 2  # A B, B A: at the least


@dataclass(frozen=True)
class ScheduleCheck:
    """What came out.

    Attributes:
        table: every load and the traffic, fixed lengths and the schedule.
        best: the fixed draft length that serves the traffic fastest.
        change: output throughput of the schedule over the traffic, against that length.
        by_block: the same as a fraction, block by block: what they differ by, no interval over prompts can see.
    """

    table: Table
    best: int
    change: Change
    by_block: tuple[float, ...] = ()

    def sentence(self) -> str:
        """For the terminal."""
        against = f"against K = {self.best}, the best fixed draft length of this traffic"
        blocks = ", ".join(f"{change:+.1%}" for change in self.by_block)
        apart = f" Server starts apart: {blocks}." if blocks else ""
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


def measure_schedule(recipe: Recipe, schedule: Schedule) -> Path:
    """Serve the schedule beside every fixed draft length; returns the artefact's directory.

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
    arm = ArmConfig(name=ARM, method="eagle3", num_draft_tokens=longest, extra={KEY: schedule})  # type: ignore[arg-type]
    settings = recipe.eval.model_copy(
        update={
            "methods": (*(own for own in recipe.eval.methods if own.name != ARM), arm),
            "served": (HEAD, ARM),
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
    rows = read_serving(directory)
    levels = summarise_serving(rows)
    shares = recipe.eval.traffic.shares(tuple(sorted({level.concurrency for level in levels})))
    check = compare(levels, shares)
    blocks = (ServingRows(*(frame[frame["block"] == b] for frame in rows)) for b in sorted(set(rows.runs["block"])))
    return replace(check, by_block=tuple(_gain_over(summarise_serving(own), check.best, shares) for own in blocks))


def compare(levels: Sequence[Level], shares: dict[int, float]) -> ScheduleCheck:
    """The schedule against every fixed draft length.

    Args:
        levels: of the head at fixed lengths and of the schedule, at loads of fixed concurrency.
        shares: requests in flight -> share of the baseline's time.
    """
    ours = _of(levels, ARM)
    fixed: dict[int, dict[int, Level]] = {}
    for level in levels:
        if level.arm == HEAD and level.concurrency in ours:
            fixed.setdefault(level.K, {})[level.concurrency] = level
    weights = {c: shares[c] for c in sorted(ours) if c in shares}
    best = max(fixed, key=lambda K: _gain(fixed[K], weights))
    change = _over_traffic(ours, fixed[best], weights)
    rows = []
    for c in weights:
        fastest = max(fixed, key=lambda K: fixed[K][c].change(THROUGHPUT))
        cells = [_percent(of[c].change(THROUGHPUT)) for of in (*fixed.values(), ours)]
        reached = ours[c].reached and fixed[fastest][c].reached
        cells += [Cell(f"K = {fastest}"), change_cell(_at_load(ours[c], fixed[fastest][c]), reached)]
        rows.append([Cell(str(c)), Cell(f"{weights[c]:.0%}"), *cells])
    over_all = [_percent(_gain(of, weights)) for of in (*fixed.values(), ours)]
    rows.append([Cell("the traffic"), Cell("100%"), *over_all, Cell(f"K = {best}"), change_cell(change)])
    lengths = [f"K = {K} (%)" for K in fixed]
    columns = ["Concurrency", "Share", *lengths, "Schedule (%)", "Best fixed", "Schedule against it (%)"]
    note = (
        "Output throughput against no speculation, and of the schedule against the best fixed draft length; brackets: "
        "95 % paired bootstrap over prompts, which cannot see what differs between server starts. Grey: the interval "
        "includes zero."
    )
    return ScheduleCheck(Table("A schedule of draft lengths beside fixed ones", columns, rows, note), best, change)


def _percent(change: float) -> Cell:
    return Cell(f"{100 * change:+.1f}")


def _gain(levels: dict[int, Level], weights: dict[int, float]) -> float:
    """Change of throughput over the traffic against no speculation: 1 / Σ share / speedup − 1."""
    time = sum(share / (1 + levels[c].change(THROUGHPUT)) for c, share in weights.items())
    return sum(weights.values()) / time - 1


def _of(levels: Sequence[Level], arm: str) -> dict[int, Level]:
    return {level.concurrency: level for level in levels if level.arm == arm}


def _gain_over(levels: Sequence[Level], K: int, shares: dict[int, float]) -> float:
    """Change of throughput over the traffic from K to the schedule, as a fraction."""
    ours, fixed = _of(levels, ARM), _of([level for level in levels if level.K == K], HEAD)
    weights = {c: shares[c] for c in sorted(ours) if c in shares}
    return (1 + _gain(ours, weights)) / (1 + _gain(fixed, weights)) - 1


def _at_load(schedule: Level, fixed: Level) -> Change:
    both = _joined(schedule, fixed)
    return throughput_change(both["output_tokens"], both["share_s"], both["output_tokens_fixed"], both["share_s_fixed"])


def _over_traffic(schedule: dict[int, Level], fixed: dict[int, Level], weights: dict[int, float]) -> Change:
    frames = {c: _joined(schedule[c], fixed[c]) for c in weights}

    def stacked(column: str) -> pd.DataFrame:  # (L, P)
        return pd.DataFrame({c: frame[column] for c, frame in frames.items()}).fillna(0.0).T

    # What the fixed length spends at each load, where the baseline spends the traffic's share.
    spent = [share / (1 + fixed[c].change(THROUGHPUT)) for c, share in weights.items()]
    return mixed_throughput_change(
        stacked("output_tokens"), stacked("share_s"), stacked("output_tokens_fixed"), stacked("share_s_fixed"), spent
    )


def _joined(schedule: Level, fixed: Level) -> pd.DataFrame:
    """One row per prompt answered by both."""
    columns = {"output_tokens_head": "output_tokens", "share_s_head": "share_s"}
    frames = [level.paired[list(columns)].rename(columns=columns) for level in (schedule, fixed)]
    return frames[0].join(frames[1], rsuffix="_fixed", how="inner")
