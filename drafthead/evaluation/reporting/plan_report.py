"""The tables of `eval/plan.py`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from drafthead.config import Recipe
from drafthead.evaluation.decision.cost_model import fit
from drafthead.evaluation.decision.planning import Worth, judge_training, worth
from drafthead.evaluation.decision.speed import speed_samples
from drafthead.evaluation.measuring.serving import HEAD
from drafthead.evaluation.reporting.decision_tables import break_even_table
from drafthead.evaluation.reporting.published import published_lengths
from drafthead.evaluation.reporting.tables import Cell, Table, table
from drafthead.evaluation.results.levels import ServingRows
from drafthead.evaluation.workload import BASELINE


@dataclass(frozen=True)
class PlanReport:
    """Tables, and the verdict in words."""

    tables: list[Table]
    verdict: str
    reason: str


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


def plan_tables(recipe: Recipe, rows: ServingRows, lengths: Sequence[float]) -> PlanReport:
    """What a head would need, and what one of each assumed acceptance length, ascending, would bring.

    Raises:
        ValueError: an assumed length cannot be, or the rows cannot carry a cost model.
    """
    max_batch, K = recipe.engine.max_num_seqs, recipe.eval.num_draft_tokens
    samples = speed_samples(rows, HEAD, max_batch)
    model = fit(samples.points(), samples.positions)
    loads = rows.runs.loc[rows.runs["arm"] == BASELINE, "concurrency"]
    shares = recipe.eval.traffic.shares(tuple(sorted({int(c) for c in loads})))
    found = [worth(model, length, K, shares, max_batch) for length in lengths]
    verdict, reason = judge_training(model, found)
    known = "is not known: measure three loads or more"
    error = f"is {model.error:.1%} at loads left out of the fit" if model.error is not None else known
    # At another K than the assumed one nothing is said of the head: grey.
    given = (lengths[0], lengths[-1])
    drafts = range(1, max(model.lengths) + 1)
    needed = break_even_table(model, shares, max_batch, drafts, lambda k: given if k == K else (1.0, k + 1))
    return PlanReport([needed, _worth_table(found, K, shares)], verdict, f"{reason}. The cost model's error {error}.")


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
