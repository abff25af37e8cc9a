"""The report's tables, built once as text with a tone, and shown on the terminal, in HTML and in Markdown."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pandas as pd
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from drafthead.data.responses import LOOP_LIMIT
from drafthead.evaluation.comparison import Change
from drafthead.evaluation.results.summary import ALL, AcceptanceSummary, MethodAcceptance
from drafthead.evaluation.workload import BASELINE, BASELINE_AGAIN, NAMES
from drafthead.statistics import Interval, acceptance_length_interval, acceptance_rate, proportion_interval

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


# Tables that set methods, K, temperatures and efforts beside each other.


@dataclass(frozen=True)
class ConditionSummary:
    """One method at one K, temperature and effort on one workload, over prompts whose baseline response does not loop.

    Attributes:
        method, k, temperature, effort, category: which; category "all" pools every prompt.
        prompts: how many.
        length: acceptance length, 1 + accepted / drafts, pooled.
        rate: accepted / proposed.
        unconditional: (K,) share of drafts that accepted position i.
        conditional: (K,) the same among drafts that accepted all before i and proposed one there.
        histogram: (K + 1,) share of drafts that accepted exactly j.
        identical: share of greedy responses equal to the baseline's at this setting, looping ones included; None at
            T > 0, where equality says nothing.
    """

    method: str
    k: int
    temperature: float
    effort: str
    category: str
    prompts: int
    length: Interval
    rate: float
    unconditional: np.ndarray
    conditional: np.ndarray
    histogram: np.ndarray
    identical: Interval | None


def summarise_conditions(rows: pd.DataFrame) -> list[ConditionSummary]:
    """Aggregate the rows of `read_conditions`: every condition, over all prompts and by category.

    The second baseline is one of them, without drafts: what it has identical is the noise floor of its setting.
    """
    found = []
    for setting in _split(rows, ["temperature", "effort"]):
        baseline = setting[setting["arm"] == BASELINE].set_index("prompt_id")
        kept = baseline.index[baseline["repeated"] <= LOOP_LIMIT]
        for group in _split(setting[setting["arm"] != BASELINE], ["arm", "k"]):
            found.append(_summary(group, ALL, kept, baseline))
            found += [
                _summary(part, str(part["category"].iloc[0]), kept, baseline)
                for part in _split(group, ["category"])
                if part["category"].iloc[0] != ALL
            ]
    return found


def _split(rows: pd.DataFrame, columns: list[str]) -> list[pd.DataFrame]:
    return [group for _, group in rows.groupby(columns, sort=False)]


def _summary(group: pd.DataFrame, category: str, kept: pd.Index, baseline: pd.DataFrame) -> ConditionSummary:
    rows, first = group.set_index("prompt_id"), group.iloc[0]
    same = rows["output_sha256"] == baseline["output_sha256"].reindex(rows.index)
    counted = rows.loc[rows.index.intersection(kept)]
    drafts = counted["drafts"].sum()
    accepted_at, reached_at, histogram = (_summed(counted[c]) for c in ("accepted_at", "reached_at", "histogram"))
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = accepted_at / drafts, accepted_at / reached_at, histogram / drafts
    return ConditionSummary(
        method=str(first["arm"]),
        k=int(first["k"]),
        temperature=float(first["temperature"]),
        effort=str(first["effort"]),
        category=category,
        prompts=len(counted),
        length=acceptance_length_interval(counted["drafts"], counted["accepted"]),
        rate=acceptance_rate(counted["proposed"], counted["accepted"]),
        unconditional=shares[0],
        conditional=shares[1],
        histogram=shares[2],
        identical=proportion_interval(int(same.sum()), len(same)) if first["temperature"] == 0 else None,
    )


def _summed(lists: pd.Series) -> np.ndarray:
    return np.sum(np.stack(list(lists)), axis=0, dtype=float) if len(lists) else np.zeros(1)


def conditions_table(summaries: Iterable[ConditionSummary]) -> Table:
    """Acceptance by method, K, temperature and effort, all workloads pooled."""
    rows = []
    for s in (s for s in summaries if s.category == ALL):
        texts = [*_setting(s), str(s.prompts), interval_text(s.length), _percent([s.rate])]
        texts += [_percent(s.unconditional), _percent(s.conditional), _percent(s.histogram)]
        texts += [percent_text(s.identical) if s.identical else "–"]
        rows.append([Cell(text) for text in texts])
    columns = [*_SETTING, "Prompts", "Acceptance length", "Rate (%)", "By position (%)", "Given the one before (%)"]
    columns += ["Accepted 0…K (%)", "Identical (%)"]
    note = (
        "Acceptance length is 1 + accepted / drafts, in tokens, and grows with K by construction: compare at equal K. "
        "Given the one before: among drafts that proposed a token there. Identical: greedy responses equal to the "
        f"baseline's of the setting; `{NAMES[BASELINE_AGAIN]}` is the floor. Brackets: 95 % bootstrap over prompts."
    )
    return Table("Acceptance side by side", columns, rows, note, text_columns=len(_SETTING))


def workloads_table(summaries: Sequence[ConditionSummary]) -> Table:
    """Acceptance length of every condition, a column for each workload."""
    workloads = sorted({s.category for s in summaries} - {ALL})
    lengths: dict[tuple[str, ...], dict[str, str]] = {}
    for s in summaries:
        if s.method != BASELINE_AGAIN:
            lengths.setdefault(_setting(s), {})[s.category] = interval_text(s.length)
    rows = [[Cell(text) for text in (*key, *(found.get(w, "–") for w in workloads))] for key, found in lengths.items()]
    return Table("Acceptance length by workload", [*_SETTING, *workloads], rows, text_columns=len(_SETTING))


_SETTING = ("Method", "K", "T", "Effort")


def _setting(s: ConditionSummary) -> tuple[str, ...]:
    return NAMES[s.method], str(s.k), f"{s.temperature:g}", s.effort


def _percent(shares: Iterable[float]) -> str:
    return " ".join("–" if np.isnan(share) else f"{100 * share:.1f}" for share in shares)
