"""Tables of the decision, and of the plan before any head: prices, what breaks even, how far to trust it."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from drafthead.artifacts import MANIFEST, ArtifactError, describe_difference, read_manifest
from drafthead.config import Recipe
from drafthead.config.evaluation import UNTRAINED
from drafthead.evaluation.decision.cost_model import CostModel, Priced, fit, speed_samples
from drafthead.evaluation.decision.variants import WORTH
from drafthead.evaluation.measuring.serving import KIND
from drafthead.evaluation.reporting.published import published_lengths
from drafthead.evaluation.reporting.tables import Cell, Table, Tone, note, number, table
from drafthead.evaluation.results.levels import Level, ServingRows, read_serving, steady
from drafthead.evaluation.workload import BASELINE, HEAD


def cost_model_tables(priced: dict[str, Priced], levels: Sequence[Level]) -> list[Table]:
    """Prices of decoding, break-even lengths and the error on loads left out, by workload.

    Args:
        priced: workload -> the head's cost model.
        levels: measured, of any method.
    """
    tables = []
    for workload, prices in priced.items():
        own = [x for x in levels if (x.workload, x.method) == (workload, HEAD) and x.steady]
        curve = prices.model.curve
        has = {"Concurrency": "this head has"} | {f"K = {K}": length for K, length in curve.items()}
        bounds = {K: (length, length) for K, length in curve.items()}
        found = [
            _price_table(prices, {(x.concurrency, x.K) for x in own}),
            break_even_table(prices.model, dict.fromkeys(c for c, _ in prices.speedups), bounds, has),
            _held_out(prices.model),
        ]
        title = f": {workload} prompts" if len(priced) > 1 else ""
        tables += [replace(one, title=one.title + title) for one in found if one]
    return tables


def _price_table(priced: Priced, ran: set[tuple[int, int]]) -> Table:
    def cell(c: int, K: int) -> Cell:
        speed = priced.speedups[c, K].scaled(100) + -100
        mark = "*" if (c, K) in ran else "°" * priced.model.extrapolates(c, K)
        tone: Tone = "better" if speed.low > 0 else "worse" if speed.high < 0 else "unresolved"
        return Cell(f"{speed:+.1f}{mark}", tone)

    rows = [
        {"Concurrency": str(c)}
        | {f"K = {K} (%)": cell(c, K) for K in priced.model.curve}
        | {"Best K": priced.model.best_draft(c)}
        for c in dict.fromkeys(c for c, _ in priced.speedups)
    ]
    return table("Every load and draft length, by the cost model", rows, note("prices"))


def break_even_table(
    model: CostModel, loads: Iterable[int], has: Mapping[int, tuple[float, float]], *more: dict[str, Any]
) -> Table:
    """r(c, K), the acceptance length at which drafting neither pays nor costs, by load and draft length.

    Args:
        model: of the step times.
        loads: requests in flight.
        has: every K -> least and most acceptance length of the head there.
        more: further rows.
    """

    def cell(c: int, K: int) -> Cell:
        needed, (low, high) = model.step_ratio(c, K), has[K]
        tone: Tone = "better" if needed < low else "worse" if needed > high else "unresolved"
        return Cell(f"{needed:.2f}" if needed <= K + 1 else f"above {K + 1}", tone)

    rows = [{"Concurrency": str(c)} | {f"K = {K}": cell(c, K) for K in has} for c in loads]
    return table("Break-even acceptance length", [*rows, *more], note("break even", work=model.work))


def _held_out(model: CostModel) -> Table | None:
    """Measured and predicted speed at loads left out of the fit, and the model's error in a sentence."""
    rows = [
        {
            "Concurrency": f"{h.batch:g}",
            "Method": "no speculation" if h.K is None else f"K = {h.K}",
            "Measured": number(h.measured, 1),
            "Predicted": number(h.predicted, 1),
            "Error (%)": Cell(number(100 * h.error, sign="+").text + "°" * (not h.inside)),
        }
        for h in model.held_out
    ]
    error = "its error is not known, which takes three loads"
    if model.error is not None:
        error = (
            f"error at {len(model.inside)} loads and draft lengths left out {model.error:.1%} (root mean square), at "
            f"most {max(abs(h.error) for h in model.inside):.1%}"
        )
    text = note("held out", model=f"Verification: {model.work}; {error}.")
    return table("Speed at loads left out of the fit", rows, text) if rows else None


# Before any head exists: what acceptance a head would need, what one of a given acceptance would bring, and whether
# training it can pay. `eval/plan.py` prints it.
#
# The step times come from a measurement: of an untrained head (its steps take as long), or of an earlier head on the
# same target and machine. The acceptance length is assumed. Decode only, as the cost model.

CAN, CANNOT, DEPENDS = "TRAINING CAN PAY", "TRAINING CANNOT PAY", "IT DEPENDS ON THE HEAD"


def rows_to_plan_from(recipe: Recipe) -> tuple[ServingRows, int]:
    """What was measured with the untrained head, else with any head of this recipe, and its servers' max_num_seqs.

    Raises:
        ArtifactError: neither was, or not to the end, or with another target.
    """
    names = (recipe.name + UNTRAINED, recipe.name)
    directories = [recipe.model_copy(update={"name": name}).results_dir / KIND for name in names]
    for directory in directories:
        if (directory / MANIFEST).exists():
            identity = read_manifest(directory)["identity"]
            wanted = {"target": recipe.target.path, "dtype": recipe.target.dtype}
            if different := describe_difference({key: identity[key] for key in wanted}, wanted):
                raise ArtifactError(
                    f"{directory} was measured with something else:\n{different}\n"
                    "give the recipe another name, or move that away and run: python eval/plan.py RECIPE --measure"
                )
            logging.getLogger(__name__).info(f"step times from {directory}")
            return steady(read_serving(directory)), identity["engine"]["max_num_seqs"]
    raise ArtifactError(
        f"there is no measurement to plan from ({' and '.join(map(str, directories))} are missing or half finished); "
        "run: python eval/plan.py RECIPE --measure"
    )


def assumed_lengths(recipe: Recipe, given: Sequence[float] | None) -> list[float]:
    """The acceptance lengths to plan with, ascending: as given, or the range of public heads at that K.

    Raises:
        ValueError: one of them cannot be, or none is given and none is published at that K.
    """
    K, known = recipe.eval.num_draft_tokens, published_lengths()
    if not given and K not in known:
        raise ValueError(
            f"no public head is known at K = {K} (only at {sorted(known)}): give --acceptance-length LOW HIGH"
        )
    if impossible := [length for length in given or () if not 1 <= length <= K + 1]:
        raise ValueError(f"--acceptance-length {impossible[0]:g}: at K = {K} it lies between 1 and {K + 1}")
    return sorted(given or {min(known[K]), max(known[K])})


def plan_tables(recipe: Recipe, rows: ServingRows, max_batch: int, lengths: Sequence[float]) -> tuple[list[Table], str]:
    """What a head would need, what one of each assumed acceptance length, ascending, would bring, and the verdict.

    Where drafts lose, the traffic is served without them; a gain of a per cent counts as paying.

    Args:
        recipe: its K and traffic are used.
        rows, max_batch: of `rows_to_plan_from`.
        lengths: assumed.

    Raises:
        ValueError: the rows cannot carry a cost model.
    """
    K = recipe.eval.num_draft_tokens
    samples = speed_samples(rows, HEAD, max_batch)
    model = fit(samples.points(), samples.positions, max_batch)
    loads = rows.runs.loc[rows.runs["method"] == BASELINE, "concurrency"]
    shares = recipe.eval.traffic.shares(map(int, loads))

    def speedups(length: float) -> list[float]:
        """At every load, and over the traffic."""
        at = [max(1.0, length / model.step_ratio(c, K)) for c in shares]
        return [*at, 1 / float(np.sum(np.divide([*shares.values()], at)))]

    columns = {
        f"Length {x:.2f} at K = {K} (%)": [number(100 * gain - 100, sign="+") for gain in speedups(x)] for x in lengths
    }
    rows_of = {"Concurrency": [*map(str, shares), "the traffic"]} | columns
    brought = Table("What a head of an assumed acceptance length would bring", pd.DataFrame(rows_of), note("worth"))
    margin = np.exp(1.96 * (model.error or 0.0))
    low, high = speedups(lengths[0] / margin)[-1], speedups(lengths[-1] * margin)[-1]
    verdict = CAN if low > 1 + WORTH else CANNOT if high < 1 + WORTH else DEPENDS
    known = "is not known: measure three loads or more"
    error = f"is {model.error:.1%} at loads left out of the fit" if model.error is not None else known
    # At another K than the assumed one nothing is said of the head: grey.
    has = {k: (lengths[0], lengths[-1]) if k == K else (1.0, k + 1.0) for k in range(1, max(model.lengths) + 1)}
    text = f"{verdict}: {low - 1:+.1%} to {high - 1:+.1%} over the traffic, decoding. The cost model's error {error}."
    return [break_even_table(model, shares, has), brought], text
