"""Tables of the decision: prices of every load and draft length, how far to trust them, and what would break even."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from drafthead.evaluation.decision.pricing import Price, Priced
from drafthead.evaluation.measuring.serving import HEAD
from drafthead.evaluation.published.figures import find_errata, published
from drafthead.evaluation.reporting.serving_tables import length_cell
from drafthead.evaluation.reporting.tables import Cell, Table, Tone, change_cell
from drafthead.evaluation.results.levels import Level, geometric_means

# The measure of ours that a published one stands for: GuideLLM's ITL is our TPOT, and so on.
_OURS = {
    "output_tokens_per_s": "output_tokens_per_s",
    "ttft_p95_s": "ttft_p95",
    "itl_p95_ms": "tpot_p95",
    "e2e_p50_s": "e2e_p50",
}


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
        for table in found:
            tables.append(table if len(priced) == 1 else replace(table, title=f"{table.title}: {workload} prompts"))
    return tables


def _price_table(priced: Priced, ran: Sequence[Level]) -> Table:
    known = priced.model.curve.known
    run = {(level.concurrency, level.K) for level in ran}
    rows = []
    for c in sorted({p.concurrency for p in priced.prices}):
        cells = [_price_cell(priced.at(c, K), (c, K) in run) for K in known]
        rows.append([Cell(str(c)), *cells, Cell(str(priced.model.best_draft(min(c, priced.max_batch))))])
    note = (
        "Change of decoding speed against no speculation, speedup(c, K) − 1 with speedup = AL(K) / r(c, K); 95 % "
        "intervals hold both the prompts and the model's error on pairs left out. * run; ° outside what was run. The "
        "wait for the first token is not in it."
    )
    columns = ["Concurrency", *(f"K = {K} (%)" for K in known), "Best K"]
    return Table("Every load and draft length, by the cost model", columns, rows, note)


def _price_cell(price: Price, ran: bool) -> Cell:
    speed = price.speedup
    mark = "*" if ran else "°" if price.extrapolated else ""
    text = f"{100 * speed.value - 100:+.1f} [{100 * speed.low - 100:+.1f}, {100 * speed.high - 100:+.1f}]{mark}"
    return Cell(text, _tone(price))


def _tone(price: Price) -> Tone:
    return "better" if price.speedup.low > 1 else "worse" if price.speedup.high < 1 else "unresolved"


def _break_even_table(priced: Priced) -> Table:
    model = priced.model
    known = model.curve.known
    rows = []
    for c in sorted({p.concurrency for p in priced.prices}):
        cells = []
        for K in known:
            price = priced.at(c, K)
            beyond = "" if price.ratio <= K + 1 else f" (above {K + 1})"
            cells.append(Cell(f"{price.ratio:.2f}{beyond}", _tone(price)))
        rows.append([Cell(str(c)), *cells])
    rows.append([Cell("this head has"), *(Cell(f"{model.curve.length(K):.2f}") for K in known)])
    crossovers = [model.crossover(K, priced.max_batch) for K in known]
    beyond = f"{priced.max_batch} or more"
    rows.append([Cell("pays up to"), *(Cell(f"{c:.0f}" if c < np.inf else beyond) for c in crossovers)])
    note = (
        "r(c, K), the time of a step with K drafts over that of a plain step: the acceptance length at which drafting "
        "neither pays nor costs. No head can reach more than K + 1. Green: this head has it; grey: unresolved. "
        "Pays up to: requests in the batch; 0 = never."
    )
    return Table("Break-even acceptance length", ["Concurrency", *(f"K = {K}" for K in known)], rows, note)


def _held_out_table(priced: Priced) -> Table:
    model = priced.model
    texts = [
        (f"{h.batch:g}", str(h.K), f"{h.measured:.3f}", f"{h.predicted:.3f}", f"{100 * h.error:+.1f}")
        for h in model.held_out
    ]
    rows = [[Cell(text) for text in row] for row in texts]
    return Table(
        "Cost model: pairs it was not fitted to",
        ["Concurrency", "K", "Speedup measured", "Predicted without it", "Error (%)"],
        rows,
        f"{model_text(priced)} Each pair predicted by a fit without it.",
        text_columns=0,
    )


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


def published_table(levels: Sequence[Level]) -> Table | None:
    """Published figures of the same workloads with this evaluation's beside them; None where there are none."""
    workloads = {level.workload for level in levels}
    errata = [e for e in find_errata() if any(e.what.startswith(w) for w in workloads)]
    rows = []
    for c in published().comparisons:
        if c.workload not in workloads or c.statistic != "geomean":
            continue
        own = {m.measure.key: m for m in geometric_means(_same(levels, c.workload, c.K))}
        for figure in c.figures:
            name = f"{c.workload}, {c.gpus} GPU(s), {figure.measure}"
            unresolved = any(e.what.startswith(name) and e.why.startswith("unresolved") for e in errata)
            tone: Tone = "unresolved" if unresolved else "better" if figure.change > 0 else "worse"
            here = own.get(_OURS.get(figure.measure, ""))
            text = f"{here.measure.label}: {100 * here.change:+.1f}" if here else "–"
            texts = [f"{c.post}: {c.workload}, {c.gpus} GPU(s), K = {c.K}", figure.measure]
            cells = [Cell(t) for t in (*texts, figure.baseline.text, figure.head.text)]
            rows.append([*cells, Cell(f"{100 * figure.change:+.1f}", tone), Cell(text)])
    if not rows:
        return None
    note = (
        "Geometric means over concurrency (published: 1 to 200), by this report's sign convention; another machine and "
        "another vLLM. Wrong or unresolved there: " + "; ".join(f"{e.what}: {e.why}" for e in errata) + "."
    )
    columns = ["Post", "Measure", "Baseline", "Head", "Change (%)", "Here (%)"]
    return Table("Published figures", columns, rows, note, text_columns=2)


def _same(levels: Sequence[Level], workload: str, K: int) -> list[Level]:
    """The head's levels on a workload at a draft length."""
    return [level for level in levels if (level.workload, level.method, level.K) == (workload, HEAD, K)]


def matrix_tables(levels: Sequence[Level]) -> list[Table]:
    """Workload × load, relative to the baseline; empty with a single workload."""
    if len({level.workload for level in levels}) < 2:
        return []
    tables = []
    for method, K in dict.fromkeys((level.method, level.K) for level in levels):
        own = [level for level in levels if (level.method, level.K) == (method, K)]
        for title, cell in _MATRICES.items():
            tables.append(_matrix(f"{title}: {method}, K = {K}", own, cell))
    return tables


def _matrix(title: str, levels: Sequence[Level], cell: Callable[[Level], Cell]) -> Table:
    loads = list(dict.fromkeys(level.load for level in levels))
    at = {(level.workload, level.load): level for level in levels}
    rows = [
        [Cell(workload), *(cell(at[workload, load]) if (workload, load) in at else Cell("–") for load in loads)]
        for workload in dict.fromkeys(level.workload for level in levels)
    ]
    return Table(title, ["Workload", *loads], rows)


_MATRICES: dict[str, Callable[[Level], Cell]] = {
    "Output throughput against the baseline (%)": lambda at: change_cell(at.changes["output_tokens_per_s"], at.reached),
    "Acceptance length": length_cell,
    "Median TTFT against the baseline (%)": lambda at: change_cell(at.changes["ttft_p50"], at.reached),
}
