"""Why is the served acceptance lower than the predicted one? What `eval/explain.py` looks at and says.

Predicted is replay: the rounds of the checkpoint's weights over the target's own greedy text (drafters.replay). Served
are an engine's counters over the same prompts with the exported head. On the same prompts the two differ by what
serving changes: rounding, or a head that is not served as it was trained. Validation against held-out prompts, both
predicted, differ by the prompts alone.

K draft positions.
"""

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from drafthead.config.evaluation import ALL
from drafthead.drafters.replay import Acceptance, empty_acceptance
from drafthead.evaluation.reporting.tables import Cell, Table, note, number, table
from drafthead.statistics import few, length_difference

VALIDATION, HELDOUT = "validation", "held out"


class Compared(NamedTuple):
    """One prompt, predicted and served.

    Attributes:
        id, workload, split: which prompt; the split is validation or held out.
        predicted, served: its rounds.
        differs_at: index of the first token of the served response that is not the stored one; None: the same text.
    """

    id: str
    workload: str
    split: str
    predicted: Acceptance
    served: Acceptance
    differs_at: int | None


def first_difference(ids: Sequence[int], other: Sequence[int]) -> int | None:
    """Where two responses part; None where they are equal."""
    return next((i for i, (a, b) in enumerate(zip_longest(ids, other)) if a != b), None)


class _Pooled:
    """Predicted and served acceptance of some prompts, and the gap as text: served minus predicted, paired."""

    def __init__(self, rows: Iterable[Compared]):
        self.rows = list(rows)
        predicted, served = [row.predicted for row in self.rows], [row.served for row in self.rows]
        none = empty_acceptance(len(predicted[0].accepted_per_position))
        self.predicted, self.served = sum(predicted, start=none), sum(served, start=none)
        both: Any = ([getattr(a, key) for a in side] for side in (served, predicted) for key in ("drafts", "accepted"))
        self.gap = f"{length_difference(*both):+.3f}"
        self.rates = list(zip(self.predicted.rates, self.served.rates, strict=True))  # (K,) of pairs


def explain_gap(rows: Sequence[Compared]) -> list[str]:
    """The gap between the prediction on validation and what is served on held-out prompts, and what it is made of."""
    validation, heldout = (_Pooled(row for row in rows if row.split == split) for split in (VALIDATION, HELDOUT))
    before, other, after = validation.predicted.length, heldout.predicted.length, heldout.served.length
    lengths = {"before": before, "other": other, "after": after, "whole": after - before, "prompts": other - before}
    lines = note("explained", **lengths, heldout=heldout.gap, validation=validation.gap).splitlines()
    if parted := next((row for row in rows if row.differs_at is not None or row.predicted != row.served), None):
        how = "the same text, other rounds"
        if parted.differs_at is not None:
            how = f"another token from number {parted.differs_at} of the response on"
        rounds = (f"{side.drafts} rounds that accept {side.accepted}" for side in (parted.predicted, parted.served))
        where = f"{parted.id} ({parted.workload}, {parted.split})"
        lines.append(f"First prompt that differs: {where}: {how}; predicted {next(rounds)}, served {next(rounds)}.")
    same = sum(row.differs_at is None for row in rows)
    equal = sum(row.predicted == row.served for row in rows)
    return [*lines, f"{same} of {len(rows)} responses are the stored ones; {equal} have exactly the predicted rounds."]


def gap_table(rows: Sequence[Compared]) -> Table:
    """Predicted and served, by workload and position."""
    shown: list[dict[str, Any]] = []
    for split in dict.fromkeys(row.split for row in rows):
        for workload in (ALL, *sorted({row.workload for row in rows if row.split == split})):
            own = _Pooled(row for row in rows if row.split == split and workload in (ALL, row.workload))
            number_of = f"{len(own.rows)}{few(len(own.rows))}"
            row: dict[str, Any] = {"Prompts": split, "Workload": workload, "Number": number_of}
            row |= {"Predicted": number(own.predicted.length, 3), "Served": number(own.served.length, 3)}
            row["Gap"] = Cell(own.gap)
            cells = (Cell(f"{100 * p:.2f} | {100 * s:.2f}") for p, s in own.rates)
            shown.append(row | {f"Position {k} (%)": cell for k, cell in enumerate(cells, 1)})
    return table("Predicted against served, on the same prompts", shown, note("gap"))
