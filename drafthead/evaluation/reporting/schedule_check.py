"""The table of a schedule of draft lengths that was served beside the fixed ones."""

from collections.abc import Sequence
from typing import Any

from drafthead.evaluation.decision.variants import Variant
from drafthead.evaluation.reporting.tables import Table, change_cell, table
from drafthead.evaluation.results.levels import THROUGHPUT, Level


def schedule_table(schedule: Variant, levels: Sequence[Level]) -> Table:
    """Output throughput at every load, and the schedule against the best fixed length there and over the traffic."""
    against = f"Schedule against K = {schedule.against} (%)"
    rows: dict[int, dict[str, Any]] = {c: {"Concurrency": str(c)} for c in schedule.by_load}
    for level in levels:
        if level.workload == schedule.verdict.workload and level.steady and level.concurrency in rows:
            cell = change_cell(level.changes[THROUGHPUT.key], level.reached)
            rows[level.concurrency][f"{level.method}, K = {level.K} (%)"] = cell
    for c, change in schedule.by_load.items():
        rows[c][against] = change
    note = (
        "Output throughput against no speculation, and of the schedule against the fixed draft length that is best for "
        "the traffic; brackets: 95 % paired bootstrap over prompts, with what differs between blocks of server starts. "
        "Grey: the interval includes zero, or there is none."
    )
    traffic = {"Concurrency": "the traffic", against: schedule.change}
    return table("A schedule of draft lengths beside fixed ones", [*rows.values(), traffic], note)
