"""`eval/plan.py`: which measurement a plan stands on, and what it says."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from drafthead.artifacts import MANIFEST, ArtifactError
from drafthead.config import Recipe
from drafthead.evaluation.decision.cost_model import CostModel, fit
from drafthead.evaluation.decision.speed import speed_samples
from drafthead.evaluation.decision.worth import Money, Worth, judge_training, needed_length, worth
from drafthead.evaluation.measuring.serving import HEAD
from drafthead.evaluation.reporting.published import published_lengths
from drafthead.evaluation.reporting.tables import Cell, Table, Tone, print_tables, table
from drafthead.evaluation.results.serving_rows import ServingRows, read_serving, steady
from drafthead.evaluation.workload import BASELINE

_SUFFIX = "-untrained"


@dataclass(frozen=True)
class PlanReport:
    """Tables, and the verdict in words."""

    tables: list[Table]
    verdict: str
    reason: str


def untrained_recipe(recipe: Recipe, lengths: Sequence[float] | None) -> Recipe:
    """The recipe under a name of its own, so that its head and results lie beside the real ones; same prompts.

    On a GPU vLLM accepts its drafts at the middle of the assumed lengths.
    """
    settings = recipe.eval
    if torch.cuda.is_available():
        assumed = assumed_lengths(recipe, lengths)
        settings = settings.model_copy(update={"synthetic_acceptance_length": sum(assumed) / len(assumed)})
    other = recipe.model_copy(update={"name": recipe.name + _SUFFIX, "eval": settings})
    if not other.prompts_dir.exists() and recipe.prompts_dir.exists():
        other.prompts_dir.parent.mkdir(parents=True, exist_ok=True)
        other.prompts_dir.symlink_to(recipe.prompts_dir.resolve())
    return other


def rows_to_plan_from(recipe: Recipe) -> ServingRows:
    """What was measured with the untrained head, else with any head of this recipe.

    Raises:
        ArtifactError: neither was, or not to the end.
    """
    directories = [
        Path(recipe.model_copy(update={"name": name}).results_dir) / "serving"
        for name in (recipe.name + _SUFFIX, recipe.name)
    ]
    for directory in directories:
        if (directory / MANIFEST).exists():
            logging.getLogger(__name__).info(f"step times from {directory}")
            return steady(read_serving(directory))
    raise ArtifactError(
        f"there is no measurement to plan from ({' and '.join(map(str, directories))} are missing or half finished); "
        "run: python eval/plan.py RECIPE --measure"
    )


def assumed_lengths(recipe: Recipe, given: Sequence[float] | None) -> list[float]:
    """The acceptance lengths to plan with, ascending: as given, or the range of public heads at that K.

    Raises:
        ValueError: none is given and none is published at that K.
    """
    if given:
        return sorted(given)
    K = recipe.eval.num_draft_tokens
    known = published_lengths()
    public = known.get(K)
    if not public:
        raise ValueError(
            f"no public head is known at K = {K} (only at {sorted(known)}): give --acceptance-length LOW HIGH"
        )
    return sorted({min(public), max(public)})


def plan_tables(
    recipe: Recipe,
    rows: ServingRows,
    lengths: Sequence[float] | None = None,
    training_cost: float | None = None,
    days: float = 365.0,
) -> PlanReport:
    """What a head would need, and what one of each assumed acceptance length would bring.

    Raises:
        ValueError: an assumed length cannot be, or the rows cannot carry a cost model.
    """
    max_batch, K = recipe.engine.max_num_seqs, recipe.eval.num_draft_tokens
    samples = speed_samples(rows, HEAD, max_batch)
    model = fit(samples.points(), samples.positions)
    baseline = rows.runs[rows.runs["arm"] == BASELINE].groupby("concurrency")[["output_tokens", "duration_s"]].sum()
    shares = recipe.eval.traffic.shares(tuple(int(c) for c in baseline.index))
    found = [worth(model, length, K, shares, max_batch) for length in assumed_lengths(recipe, lengths)]
    rates = baseline["output_tokens"] / baseline["duration_s"]
    # A load that was not run is served like the nearest one below that was.
    tokens_per_s = sum(share * rates[max([c for c in rates.index if c <= load] or [rates.index[0]])]
                       for load, share in shares.items())  # fmt: skip
    money = _money(recipe, training_cost, days)
    verdict, reason = judge_training(model, found, tokens_per_s, money)
    known = "is not known: measure more loads or draft lengths"
    error = f"is {model.error:.1%} on {len(model.held_out)} held-out pairs" if model.error is not None else known
    if money is None:
        reason += "; with eval.price_per_gpu_hour, eval.traffic.output_tokens_per_day and --training-cost, in days"
    tables = [_needed_table(model, found, K, shares, max_batch), _worth_table(found, K, shares)]
    return PlanReport(tables, verdict, f"{reason}. The cost model's error {error}.")


def print_plan(plan: PlanReport) -> None:
    """Both tables and the verdict on the terminal."""
    print_tables(plan.tables)
    print(f"\n{plan.verdict}: {plan.reason}")


def _money(recipe: Recipe, training_cost: float | None, days: float) -> Money | None:
    price, tokens = recipe.eval.price_per_gpu_hour, recipe.eval.traffic.output_tokens_per_day
    if price is None or tokens is None or training_cost is None:
        return None
    return Money(price, recipe.engine.tensor_parallel_size, tokens, training_cost, days)


def _needed_table(model: CostModel, found: list[Worth], K: int, shares: dict[int, float], max_batch: int) -> Table:
    low, high = found[0].length, found[-1].length

    def cell(needed: float, k: int) -> Cell:
        tone: Tone = "" if k != K else "better" if needed < low else "worse" if needed > high else "unresolved"
        return Cell(f"{needed:.2f}" if needed <= k + 1 else f"above {k + 1}", tone)

    lengths = range(1, max(model.lengths) + 1)
    rows = [
        {"Concurrency": str(c)} | {f"K = {k}": cell(model.step_ratio(min(c, max_batch), k), k) for k in lengths}
        for c in shares
    ]
    overall = {f"K = {k}": cell(needed_length(model, k, shares, max_batch), k) for k in lengths}
    note = (
        f"Below it drafting costs more than it brings. Green at K = {K}: below {low:.2f}, the least assumed; "
        f"red: above {high:.2f}, the most assumed. Verification: {model.work}."
    )
    return table("Acceptance length that a head must reach", [*rows, {"Concurrency": "the traffic"} | overall], note)


def _worth_table(found: list[Worth], K: int, shares: dict[int, float]) -> Table:
    def row(load: str, share: float, cell_of: Callable[[Worth], str]) -> dict[str, Any]:
        cells = {f"Length {w.length:.2f} at K = {K} (%)": Cell(cell_of(w)) for w in found}
        return {"Concurrency": load, "Share": Cell(f"{share:.0%}")} | cells

    rows = [
        row(str(c), share, lambda w, c=c: f"{100 * w.loads[c][1] - 100:+.1f} (K = {w.loads[c][0]})")  # type: ignore[misc]
        for c, share in shares.items()
    ]
    rows.append(row("the traffic", 1.0, lambda w: f"{100 * w.speedup - 100:+.1f}"))
    note = "Change of decoding speed at the best draft length of each load; every draft token equally likely accepted."
    return table("What a head of an assumed acceptance length would bring", rows, note)
