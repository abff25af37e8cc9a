"""Before any head exists: what acceptance a head would need, what one of a given acceptance would bring, and whether
training it can pay. `eval/plan.py` prints it.

The step times come from a measurement: of an untrained head (its steps take as long), or of an earlier head on the
same target and machine. The acceptance is assumed. Every draft token is accepted with the same probability here, given
those before it, so one number at one K gives AL(K) for every other. Decode only, as the cost model.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy.optimize import brentq

from drafthead.artifacts import MANIFEST, ArtifactError
from drafthead.config import Recipe
from drafthead.evaluation.decision.cost_model import AcceptanceCurve, CostModel, fit, speed_samples
from drafthead.evaluation.measuring.serving import KIND
from drafthead.evaluation.reporting.decision_tables import break_even_table
from drafthead.evaluation.reporting.published import published_lengths
from drafthead.evaluation.reporting.tables import Cell, Table, note, table
from drafthead.evaluation.results.levels import ServingRows, read_serving, steady
from drafthead.evaluation.workload import BASELINE, HEAD

CAN, CANNOT, DEPENDS = "TRAINING CAN PAY", "TRAINING CANNOT PAY", "IT DEPENDS ON THE HEAD"
_WORTH = 0.01  # a gain below this is none
_SUFFIX = "-untrained"


def untrained_recipe(recipe: Recipe, lengths: Sequence[float]) -> Recipe:
    """The recipe under a name of its own, so that its head and results lie beside the real ones; same prompts.

    On a GPU vLLM accepts its drafts at the middle of the assumed lengths.
    """
    settings = recipe.eval
    if torch.cuda.is_available():
        settings = settings.model_copy(update={"synthetic_acceptance_length": sum(lengths) / len(lengths)})
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
    names = (recipe.name + _SUFFIX, recipe.name)
    directories = [recipe.model_copy(update={"name": name}).results_dir / KIND for name in names]
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
    K, known = recipe.eval.num_draft_tokens, published_lengths()
    if not given and K not in known:
        raise ValueError(
            f"no public head is known at K = {K} (only at {sorted(known)}): give --acceptance-length LOW HIGH"
        )
    return sorted(given or {min(known[K]), max(known[K])})


def even_curve(length: float, K: int, longest: int) -> AcceptanceCurve:
    """AL(1..longest) of drafts whose every token is accepted with the same probability, given those before.

    Args:
        length: acceptance length at K.
        K: where it holds.
        longest: how far to go.

    Raises:
        ValueError: no such drafts have that acceptance length.
    """
    if not 1 <= length <= K + 1:
        raise ValueError(f"an acceptance length of {length} at K = {K} cannot be: it lies between 1 and {K + 1}")

    def at(rate: float, k: int = K) -> float:
        return float(np.sum(rate ** np.arange(k + 1)))

    rate = brentq(lambda r: at(r) - length, 0.0, 1.0)
    return AcceptanceCurve({k: at(rate, k) for k in range(1, longest + 1)}, ())


@dataclass(frozen=True)
class Worth:
    """What a head of an assumed acceptance would bring.

    Attributes:
        length: assumed acceptance length at K.
        speedup: over the traffic, with the best draft length at every load.
        loads: concurrency -> (best K, speedup there).
    """

    length: float
    speedup: float
    loads: dict[int, tuple[int, float]]


def worth(model: CostModel, length: float, K: int, shares: dict[int, float], max_batch: int) -> Worth:
    """What a head of acceptance length `length` at K would bring over the traffic.

    Args:
        model: step times; its own acceptance is not used.
        length, K: assumed.
        shares: requests in flight -> share of the time.
        max_batch: the engine's max_num_seqs.
    """
    assumed = replace(model, curve=even_curve(length, K, max(model.lengths)))
    best = {c: assumed.best_draft(min(c, max_batch)) for c in shares}
    loads = {c: (k, assumed.speedup(min(c, max_batch), k)) for c, k in best.items()}
    return Worth(length, 1 / sum(share / loads[c][1] for c, share in shares.items()), loads)


def judge_training(model: CostModel, found: Sequence[Worth]) -> tuple[str, str]:
    """The verdict over the assumed acceptance lengths, and its reason: any gain of a per cent counts as paying.

    Args:
        model: whose error at loads left out widens both ends.
        found: one for every acceptance length assumed.
    """
    margin = np.exp(1.96 * (model.error or 0.0))
    low, high = min(w.speedup for w in found) / margin, max(w.speedup for w in found) * margin
    verdict = CAN if low > 1 + _WORTH else CANNOT if high < 1 + _WORTH else DEPENDS
    return verdict, f"{low - 1:+.1%} to {high - 1:+.1%} over the traffic, decoding"


class PlanReport(NamedTuple):
    """Tables, and the verdict in words."""

    tables: list[Table]
    verdict: str
    reason: str


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
    rows: list[dict[str, Any]] = [{"Concurrency": str(c), "Share": Cell(f"{share:.0%}")} for c, share in shares.items()]
    rows.append({"Concurrency": "the traffic", "Share": Cell("100%")})
    for w in found:
        cells = [f"{100 * speedup - 100:+.1f} (K = {k})" for k, speedup in w.loads.values()]
        for row, text in zip(rows, [*cells, f"{100 * w.speedup - 100:+.1f}"], strict=True):
            row[f"Length {w.length:.2f} at K = {K} (%)"] = Cell(text)
    return table("What a head of an assumed acceptance length would bring", rows, note("worth"))
