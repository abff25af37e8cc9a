"""Tables of the decision: prices of every load and draft length, how far to trust them, and what would break even."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from drafthead.evaluation.decision.pricing import Price, Priced
from drafthead.evaluation.measuring.serving import HEAD
from drafthead.evaluation.reporting.tables import Cell, Table, Tone, number, table
from drafthead.evaluation.results.levels import Level


def cost_model_tables(priced: dict[str, Priced], levels: Sequence[Level]) -> list[Table]:
    """Prices of decoding, break-even lengths and the error on pairs left out, by workload.

    Args:
        priced: workload -> the head's cost model.
        levels: measured, of any method.
    """
    tables = []
    for workload, prices in priced.items():
        ran = [level for level in levels if level.workload == workload and level.method == HEAD and level.steady]
        found = [_price_table(prices, ran), _break_even_table(prices)]
        found += [_held_out_table(prices)] if prices.model.held_out else []
        for one in found:
            tables.append(one if len(priced) == 1 else replace(one, title=f"{one.title}: {workload} prompts"))
    return tables


def _by_load(priced: Priced) -> list[int]:
    return sorted({p.concurrency for p in priced.prices})


def _price_table(priced: Priced, ran: Sequence[Level]) -> Table:
    run = {(level.concurrency, level.K) for level in ran}
    rows = [
        {"Concurrency": str(c)}
        | {f"K = {K} (%)": _price_cell(priced.at(c, K), (c, K) in run) for K in priced.model.curve.known}
        | {"Best K": Cell(str(priced.model.best_draft(min(c, priced.max_batch))))}
        for c in _by_load(priced)
    ]
    note = (
        "Change of decoding speed against no speculation, speedup(c, K) − 1 with speedup = AL(K) / r(c, K); 95 % "
        "intervals hold both the prompts and the model's error on pairs left out. * run; ° outside what was run. The "
        "wait for the first token is not in it."
    )
    return table("Every load and draft length, by the cost model", rows, note)


def _price_cell(price: Price, ran: bool) -> Cell:
    speed = price.speedup
    mark = "*" if ran else "°" if price.extrapolated else ""
    text = f"{100 * speed.value - 100:+.1f} [{100 * speed.low - 100:+.1f}, {100 * speed.high - 100:+.1f}]{mark}"
    return Cell(text, _tone(price))


def _tone(price: Price) -> Tone:
    return "better" if price.speedup.low > 1 else "worse" if price.speedup.high < 1 else "unresolved"


def _break_even_table(priced: Priced) -> Table:
    model, known = priced.model, priced.model.curve.known

    def row(name: str, cell_of: Callable[[int], Cell]) -> dict[str, Any]:
        return {"Concurrency": name} | {f"K = {K}": cell_of(K) for K in known}

    def ratio(c: int, K: int) -> Cell:
        price = priced.at(c, K)
        return Cell(f"{price.ratio:.2f}" + (f" (above {K + 1})" if price.ratio > K + 1 else ""), _tone(price))

    def pays_up_to(K: int) -> Cell:
        crossover = model.crossover(K, priced.max_batch)
        return Cell(f"{crossover:.0f}" if crossover < np.inf else f"{priced.max_batch} or more")

    rows = [row(str(c), lambda K, c=c: ratio(c, K)) for c in _by_load(priced)]  # type: ignore[misc]
    rows.append(row("this head has", lambda K: number(model.curve.length(K), 2)))
    rows.append(row("pays up to", pays_up_to))
    note = (
        "r(c, K), the time of a step with K drafts over that of a plain step: the acceptance length at which drafting "
        "neither pays nor costs. No head can reach more than K + 1. Green: this head has it; grey: unresolved. "
        "Pays up to: requests in the batch; 0 = never."
    )
    return table("Break-even acceptance length", rows, note)


def _held_out_table(priced: Priced) -> Table:
    rows = [
        {
            "Concurrency": Cell(f"{h.batch:g}"),
            "K": h.K,
            "Speedup measured": number(h.measured, 3),
            "Predicted without it": number(h.predicted, 3),
            "Error (%)": Cell(f"{100 * h.error:+.1f}"),
        }
        for h in priced.model.held_out
    ]
    note = f"{model_text(priced)} Each pair predicted by a fit without it."
    return table("Cost model: pairs it was not fitted to", rows, note)


def model_text(priced: Priced) -> str:
    """The model and its error in a sentence or two."""
    model = priced.model
    error = "no pair could be left out, so its error is not known: run more draft lengths or loads"
    if model.error is not None:
        largest = max(abs(h.error) for h in model.held_out)
        error = (
            f"error on {len(model.held_out)} held-out pairs {model.error:.1%} (root mean square), at most {largest:.1%}"
        )
    return f"Verification: {model.work}; {error}."
