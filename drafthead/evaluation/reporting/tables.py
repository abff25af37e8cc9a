"""The report's tables, built once as text with a tone, and shown on the terminal, in HTML and in Markdown."""

import sys
from dataclasses import dataclass
from typing import Literal

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from drafthead.evaluation.comparison import Change
from drafthead.evaluation.results.summary import ALL, AcceptanceSummary, MethodAcceptance
from drafthead.evaluation.workload import NAMES
from drafthead.statistics import Interval

Tone = Literal["", "better", "worse", "unresolved"]
_RICH: dict[str, str] = {"": "", "better": "green", "worse": "red", "unresolved": "bright_black"}


@dataclass(frozen=True)
class Cell:
    """Text and what colour may say about it; the text alone says it too."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Table:
    """A table whose first columns are text and whose others are numbers with their unit in the header."""

    title: str
    columns: list[str]
    rows: list[list[Cell]]
    note: str = ""
    text_columns: int = 1


def interval_text(interval: Interval, digits: int = 2) -> str:
    """`2.41 [2.30, 2.52]`; a dash where nothing was observed."""
    if np.isnan(interval.value):
        return "–"
    if np.isnan(interval.low):
        return f"{interval.value:.{digits}f}"
    return f"{interval.value:.{digits}f} [{interval.low:.{digits}f}, {interval.high:.{digits}f}]"


def percent_text(interval: Interval) -> str:
    """A share with its interval in percent."""
    return interval_text(interval.scaled(100), 1)


def change_cell(change: Change, reached: bool = True) -> Cell:
    """A relative change in percent, positive = better; grey and marked when nothing follows from it.

    Args:
        change: the change and whether its sign is resolved.
        reached: whether the load was what it says; otherwise the methods were not compared at that load.
    """
    i = change.interval.scaled(100)
    if np.isnan(i.value):
        return Cell("–")
    text = f"{i.value:+.1f} [{i.low:+.1f}, {i.high:+.1f}]" if np.isfinite(i.low) else f"{i.value:+.1f} no interval,"
    if not reached:
        return Cell(f"{text} load not reached", "unresolved")
    if not change.resolved:
        return Cell(f"{text} unresolved", "unresolved")
    return Cell(text, "better" if i.value > 0 else "worse")


def acceptance_table(summary: AcceptanceSummary) -> Table:
    """Acceptance length by workload and method."""
    note = (
        f"{summary.prompts - summary.looping} of {summary.prompts} held-out prompts; {summary.looping} left out "
        f"because the baseline's own response loops (over 10 % of its 8-grams repeat), where acceptance means little. "
        f"{summary.ended:.0%} of the baseline's responses end by themselves. Brackets: 95 % bootstrap over prompts. "
        "Tokens per step counts steps without a draft too."
    )
    columns = ["Workload", "Method", "K", "Prompts", "Acceptance length (tokens)", "Rate (%)", "Tokens per step"]
    entries = sorted(summary.methods, key=lambda m: (m.category != ALL, m.category))
    if len({m.K for m in entries}) > 1:
        note += " Acceptance length grows with K by construction: compare at equal K."
    return Table(
        f"Acceptance length, T = {summary.temperature:g}",
        columns,
        [_acceptance_row(m) for m in entries],
        note,
        text_columns=2,
    )


def _acceptance_row(m: MethodAcceptance) -> list[Cell]:
    rate = "–" if np.isnan(m.rate) else f"{100 * m.rate:.1f}"
    per_step = "–" if np.isnan(m.tokens_per_step) else f"{m.tokens_per_step:.2f}"
    texts = [m.category, NAMES[m.method], str(m.K), str(m.prompts), interval_text(m.length), rate, per_step]
    return [Cell(t) for t in texts]


def position_table(summary: AcceptanceSummary) -> Table:
    """Acceptance at every draft position, all workloads together."""
    pooled = [m for m in summary.methods if m.category == ALL]
    K = max(m.K for m in pooled)
    rows = [
        [Cell(NAMES[m.method]), Cell(kind), *map(_share, values), *[Cell("")] * (K - m.K)]
        for m in pooled
        for kind, values in (
            ("all drafts", m.positions.unconditional),
            ("given the one before", m.positions.conditional),
        )
    ]
    columns = ["Method", "Share of", *(f"Position {k + 1} (%)" for k in range(K))]
    return Table("Acceptance by draft position", columns, rows, text_columns=2)


def _share(value: float) -> Cell:
    return Cell("–" if np.isnan(value) else f"{100 * value:.1f}")


def lossless_table(summary: AcceptanceSummary) -> Table:
    """Share of responses equal to the baseline's, beside what the baseline makes of itself."""
    rows = [[Cell(NAMES[method]), Cell(percent_text(share))] for method, share in summary.identical.items()]
    note = (
        "All held-out prompts. Greedy decoding; rounding differs with the batch, so the noise floor may be below 100 %."
    )
    return Table("Responses identical to the baseline", ["Method", "Identical (%)"], rows, note)


def print_table(table: Table, console: Console | None = None) -> None:
    """Show a table on the terminal."""
    rich = RichTable(title=table.title, caption=table.note, title_justify="left", caption_justify="left")
    for index, column in enumerate(table.columns):
        rich.add_column(column, justify="left" if index < table.text_columns else "right")
    for row in table.rows:
        rich.add_row(*(Text(cell.text, style=_RICH[cell.tone]) for cell in row))
    # A log file has no width of its own; rich would wrap it at 80.
    (console or Console(width=None if sys.stdout.isatty() else 140)).print(rich)


def acceptance_tables(summary: AcceptanceSummary) -> list[Table]:
    """Every table of the offline measurement; whether responses stayed the same is tested for greedy ones only."""
    tables = [acceptance_table(summary), position_table(summary)]
    return [*tables, lossless_table(summary)] if summary.identical else tables


def print_acceptance(summary: AcceptanceSummary) -> None:
    """The tables of the offline measurement."""
    for table in acceptance_tables(summary):
        print_table(table)
