"""The table of a schedule of draft lengths that was served beside the fixed ones."""

from collections.abc import Sequence

from drafthead.evaluation.decision.variants import Variant
from drafthead.evaluation.reporting.tables import Cell, Table, change_cell
from drafthead.evaluation.results.levels import THROUGHPUT, Level


def schedule_table(schedule: Variant, levels: Sequence[Level]) -> Table:
    """Output throughput at every load, and the schedule against the best fixed length there and over the traffic."""
    here = [level for level in levels if level.workload == schedule.verdict.workload and level.steady]
    series = list(dict.fromkeys((level.method, level.K) for level in here))
    at = {(level.method, level.K, level.concurrency): level for level in here}
    rows = []
    for c, change in schedule.by_load.items():
        cells = [
            change_cell(at[*own, c].changes[THROUGHPUT.key], at[*own, c].reached) if (*own, c) in at else Cell("–")
            for own in series
        ]
        rows.append([Cell(str(c)), *cells, change_cell(change)])
    rows.append([Cell("the traffic"), *(Cell("") for _ in series), change_cell(schedule.change)])
    columns = [
        "Concurrency",
        *(f"{method}, K = {K} (%)" for method, K in series),
        f"Schedule against K = {schedule.against} (%)",
    ]
    note = (
        "Output throughput against no speculation, and of the schedule against the fixed draft length that is best for "
        "the traffic; brackets: 95 % paired bootstrap over prompts, with what differs between blocks of server starts. "
        "Grey: the interval includes zero, or there is none."
    )
    return Table("A schedule of draft lengths beside fixed ones", columns, rows, note)
