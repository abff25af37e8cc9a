"""One table for the terminal, HTML and Markdown: a DataFrame whose cells become text with a tone."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import numpy as np
import pandas as pd
import yaml
from rich.table import Table as RichTable
from rich.text import Text

from drafthead.progress import terminal
from drafthead.statistics import Array, Change, Interval, few

Tone = Literal["", "better", "worse", "unresolved"]
_NOTES: dict[str, str] = yaml.safe_load((resources.files(__package__) / "templates/notes.yaml").read_text("utf-8"))
_RICH: dict[str, str] = {"": "", "better": "green", "worse": "red", "unresolved": "bright_black"}


@dataclass(frozen=True)
class Cell:
    """Text and what colour may say about it; the text alone says it too."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Table:
    """A table with units in its header.

    Attributes:
        frame: of strings, which stand on the left, and of numbers, intervals, changes and cells.
    """

    title: str
    frame: pd.DataFrame
    note: str = ""

    @property
    def rows(self) -> list[list[Cell]]:
        return [[as_cell(value) for value in row] for row in self.frame.itertuples(index=False)]

    @property
    def text_columns(self) -> int:
        """The columns on the left that are text."""
        texts = [all(isinstance(value, str) for value in self.frame[column]) for column in self.frame]
        return [*texts, False].index(False)


def note(key: str, **values: Any) -> str:
    """What stands under a table, of templates/notes.yaml, with values filled in."""
    return _NOTES[key].format(**values)


def table(title: str, rows: Iterable[Mapping[str, Any]], note: str = "") -> Table:
    """A table of rows by column name; a column that a row lacks shows a dash there."""
    return Table(title, pd.DataFrame(list(rows), dtype=object), note)


def as_cell(value: Any) -> Cell:
    """How a value is shown: a dash where there is none."""
    if isinstance(value, Cell):
        return value
    if isinstance(value, Change):
        return change_cell(value)
    if isinstance(value, float | Interval):
        return number(value, 2)
    if value is None:
        return Cell("–")
    return Cell(value if isinstance(value, str) else f"{value:,}")


def length_cell(length: float | Interval, prompts: int) -> Cell:
    """An acceptance length; grey and marked where so few prompts decide nothing."""
    shown = as_cell(length)
    return Cell(shown.text + few(prompts), "unresolved") if few(prompts) and shown.text != "–" else shown


def number(value: float | Interval | Array, digits: int = 1, sign: str = "") -> Cell:
    """A number, several one after the other, or an interval; a dash where there is none.

    Args:
        value: which.
        digits: behind the point.
        sign: "+" shows that of positive numbers too.
    """
    if isinstance(value, Interval):
        return Cell("–" if np.isnan(value.value) else f"{value:{sign}.{digits}f}")
    texts = (f"{x:{sign}.{digits}f}" if np.isfinite(x) else "–" for x in np.atleast_1d(value))
    return Cell(" ".join(texts))


def change_cell(change: Change, reached: bool = True, unit: str = "") -> Cell:
    """A relative change, a time's in words; grey and marked when nothing follows from it.

    Args:
        change: the change and whether its sign is resolved.
        reached: whether the load was what it says; otherwise the methods were not compared at that load.
        unit: behind a change that is no time's; empty where the header says per cent.
    """
    text = change.text(unit)
    if not np.isfinite(change.value):
        return Cell(text)
    if not reached:
        return Cell(f"{text}, load not reached", "unresolved")
    return Cell(text, ("better" if change.value > 0 else "worse") if change.resolved else "unresolved")


def print_table(table: Table) -> None:
    """Show a table on the terminal."""
    rich = RichTable(title=table.title, caption=table.note, title_justify="left", caption_justify="left")
    for index, column in enumerate(table.frame.columns):
        rich.add_column(column, justify="left" if index < table.text_columns else "right")
    for row in table.rows:
        rich.add_row(*(Text(cell.text, style=_RICH[cell.tone]) for cell in row))
    terminal().print(rich)
