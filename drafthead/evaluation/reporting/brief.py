"""What a decider needs, on one screen: the verdict, one table, what to start. Everything else is in the report."""

from collections.abc import Sequence

from drafthead.config import Recipe
from drafthead.evaluation.decision.analysis import Analysis
from drafthead.evaluation.decision.deployment import advise
from drafthead.evaluation.decision.training_cost import payback_text
from drafthead.evaluation.decision.verdict import Verdict
from drafthead.evaluation.reporting.serving_tables import length_cell, level_name, series_name
from drafthead.evaluation.reporting.tables import Cell, Table, change_cell, interval_text, print_table
from drafthead.evaluation.results.levels import THROUGHPUT, Level
from drafthead.evaluation.results.summary import AcceptanceSummary
from drafthead.evaluation.workload import NAMES


def print_brief(recipe: Recipe, analysis: Analysis) -> None:
    """The verdict on the terminal, with the one table it rests on."""
    print_table(brief_table(analysis.verdicts, analysis.levels))
    print(f"\n{acceptance_line(analysis.acceptance)}")
    for verdict in analysis.verdicts:
        print(f"\n{verdict_text(verdict)}")
    print_advice(recipe, analysis, brief=True)


def print_advice(recipe: Recipe, analysis: Analysis, brief: bool = False) -> None:
    """What to start, `brief` by its flag where there is one, and when the head has paid for itself."""
    advice = advise(recipe, analysis)
    print(f"\n{advice.text}\n  {(brief and advice.flag) or advice.command}")
    if text := payback_text(recipe, analysis.main_levels, analysis.main.change.resolved, analysis.main.up_to):
        print(f"\n{text}")


def verdict_text(verdict: Verdict) -> str:
    """A verdict in two lines."""
    return f"{verdict.workload} prompts, {verdict.method} at K = {verdict.K}: {verdict.headline}\n  {verdict.reason}"


def brief_table(verdicts: Sequence[Verdict], levels: Sequence[Level]) -> Table:
    """Every judged load of the draft lengths that the verdicts are about."""
    rows = []
    for verdict in verdicts:
        decisions = {level.concurrency: level.decision for level in verdict.levels}
        for level in levels:
            if level.steady and (level.workload, level.method, level.K) == (
                verdict.workload,
                verdict.method,
                verdict.K,
            ):
                decision = decisions.get(level.concurrency, "not in the traffic")
                rows.append([Cell(level_name(level, levels)), *_cells(level), Cell(decision)])
    columns = [
        "Concurrency",
        "Method",
        "Output tok/s",
        "Change (%)",
        "Median latency (%)",
        "Acceptance length",
        "Verdict",
    ]
    note = "Positive = better everywhere; brackets: 95 % paired bootstrap over prompts; grey: unresolved."
    return Table("Serving with the head, against no speculation", columns, rows, note, text_columns=2)


def _cells(level: Level) -> list[Cell]:
    baseline, method = level.values[THROUGHPUT.key]
    changes = [change_cell(level.changes[key], level.reached) for key in (THROUGHPUT.key, "e2e_p50")]
    return [
        Cell(series_name(level.method, level.K)),
        Cell(f"{baseline:.1f} → {method:.1f}"),
        *changes,
        length_cell(level),
    ]


def acceptance_line(summary: AcceptanceSummary) -> str:
    """Acceptance length of every method over all prompts, and how often the text stayed the same."""
    pooled = [m for m in summary.methods if m.category == "all"]
    lengths = ", ".join(f"{NAMES[m.method]} {interval_text(m.length)} (K = {m.K})" for m in pooled)
    same = ", ".join(f"{NAMES[method]} {100 * share.value:.0f} %" for method, share in summary.identical.items())
    text = f"Acceptance length at T = {summary.temperature:g}: {lengths}."
    return f"{text} Responses identical to the baseline's: {same}." if same else text
