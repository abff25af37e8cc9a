"""Tables of the decision: prices of every load and draft length, how far to trust them, what would break even."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from drafthead.evaluation.decision.cost_model import CostModel, Priced
from drafthead.evaluation.decision.variants import Variant
from drafthead.evaluation.reporting.tables import Cell, Table, Tone, change_cell, note, number, signed, table
from drafthead.evaluation.results.levels import THROUGHPUT, Level
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
        found = [_price_table(prices, {(x.concurrency, x.K) for x in own}), _break_even(prices), _held_out(prices)]
        title = f": {workload} prompts" if len(priced) > 1 else ""
        tables += [replace(one, title=one.title + title) for one in found if one]
    return tables


def _price_table(priced: Priced, ran: set[tuple[int, int]]) -> Table:
    def cell(c: int, K: int) -> Cell:
        speed = priced.speedups[c, K].scaled(100) + -100
        mark = "*" if (c, K) in ran else "°" * priced.model.extrapolates(min(c, priced.max_batch), K)
        tone: Tone = "better" if speed.low > 0 else "worse" if speed.high < 0 else "unresolved"
        return Cell(f"{speed.value:+.1f} [{speed.low:+.1f}, {speed.high:+.1f}]{mark}", tone)

    rows = [
        {"Concurrency": str(c)}
        | {f"K = {K} (%)": cell(c, K) for K in priced.model.curve.known}
        | {"Best K": priced.model.best_draft(min(c, priced.max_batch))}
        for c in priced.loads
    ]
    return table("Every load and draft length, by the cost model", rows, note("prices"))


def break_even_table(
    model: CostModel,
    loads: Iterable[int],
    max_batch: int,
    lengths: Sequence[int],
    has: Callable[[int], tuple[float, float]],
    *more: dict[str, Any],
) -> Table:
    """r(c, K), the acceptance length at which drafting neither pays nor costs, by load and draft length.

    Args:
        model: of the step times.
        loads: requests in flight.
        max_batch: the engine's max_num_seqs.
        lengths: every K.
        has: K -> least and most acceptance length of the head there.
        more: further rows.
    """

    def cell(c: int, K: int) -> Cell:
        needed, (low, high) = model.step_ratio(min(c, max_batch), K), has(K)
        tone: Tone = "better" if needed < low else "worse" if needed > high else "unresolved"
        return Cell(f"{needed:.2f}" if needed <= K + 1 else f"above {K + 1}", tone)

    rows = [{"Concurrency": str(c)} | {f"K = {K}": cell(c, K) for K in lengths} for c in loads]
    return table("Break-even acceptance length", [*rows, *more], note("break even", work=model.work))


def _break_even(priced: Priced) -> Table:
    curve = priced.model.curve
    own = {"Concurrency": "this head has"} | {f"K = {K}": curve.length(K) for K in curve.known}
    has = lambda K: (curve.length(K), curve.length(K))  # noqa: E731
    return break_even_table(priced.model, priced.loads, priced.max_batch, curve.known, has, own)


def _held_out(priced: Priced) -> Table | None:
    rows = [
        {
            "Concurrency": f"{h.batch:g}",
            "Method": "no speculation" if h.K is None else f"K = {h.K}",
            "Measured": number(h.measured, 1),
            "Predicted": number(h.predicted, 1),
            "Error (%)": Cell(signed(100 * h.error).text + ("" if h.inside else "°")),
        }
        for h in priced.model.held_out
    ]
    text = note("held out", model=model_text(priced.model))
    return table("Speed at loads left out of the fit", rows, text) if rows else None


def model_text(model: CostModel) -> str:
    """The model and its error in a sentence."""
    error = "its error is not known, which takes three loads"
    if model.error is not None:
        error = (
            f"error at {len(model.inside)} loads and draft lengths left out {model.error:.1%} (root mean square), at "
            f"most {max(abs(h.error) for h in model.inside):.1%}"
        )
    return f"Verification: {model.work}; {error}."


def schedule_table(schedule: Variant, levels: Sequence[Level]) -> Table:
    """Output throughput of a served schedule at every load, against the best fixed draft length."""
    against = f"Schedule against K = {schedule.against} (%)"
    rows: dict[int, dict[str, Any]] = {c: {"Concurrency": str(c)} for c in schedule.by_load}
    for level in levels:
        if level.workload == schedule.verdict.workload and level.steady and level.concurrency in rows:
            cell = change_cell(level.changes[THROUGHPUT.key], level.reached)
            rows[level.concurrency][f"{level.method}, K = {level.K} (%)"] = cell
    for c, change in schedule.by_load.items():
        rows[c][against] = change
    traffic = {"Concurrency": "the traffic", against: schedule.change}
    return table("A schedule of draft lengths beside fixed ones", [*rows.values(), traffic], note("schedule"))
