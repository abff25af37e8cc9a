"""Tables of the cost model: prices, what breaks even, how far to trust it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from drafthead.evaluation.decision.cost_model import CostModel, Priced
from drafthead.evaluation.reporting.tables import Cell, Table, Tone, note, number, table
from drafthead.evaluation.results.levels import Level
from drafthead.evaluation.workload import HEAD


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
