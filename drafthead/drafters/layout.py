"""How a packed batch is laid out: documents end to end, and in each the rows that lead to a loss.

Nothing reads a row's states of TTT step 1 and later but the row itself, and the loss begins two tokens
before the first token the target generated. So all rows of a document from there to its end are the only
ones that need more than a step-0 key and value: for a chat prompt of 4,000 tokens and an answer of 500,
an eighth of the work. Two documents of five and three tokens, P prompt and G generated:

    token     0  1  2  3  4 | 5  6  7
              P  P  P  P  G | P  G  G
    rows            2  3  4 | 5  6  7          rows = [2, 3, 4, 5, 6, 7], cu_rows = [0, 3, 6]

Shapes: T tokens, R rows, S documents.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """Documents of a packed batch and their loss rows.

    Attributes:
        cu_seqlens: (S + 1,) int32, where each document begins among the T tokens, then T.
        rows: (R,) int64, ascending token indices of the rows: the tail of each document.
        cu_rows: (S + 1,) int32, where each document begins among the R rows, then R.
        longest: most tokens of a document. Known on the host: asking a GPU for it would wait for all it has to do.
        most_rows: most rows of a document, likewise.
    """

    cu_seqlens: Tensor
    rows: Tensor
    cu_rows: Tensor
    longest: int
    most_rows: int

    def to(self, device: torch.device) -> "Layout":
        """The same layout on a device."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in ("cu_seqlens", "rows", "cu_rows")}
        return replace(self, **moved)


def first_loss_row(loss_mask: Tensor) -> int:
    """Index of the first row of a document that can carry loss: two before its first generated token.

    Args:
        loss_mask: (T,) of one document, nonzero where the target generated the token.

    Raises:
        ValueError: nothing was generated.
    """
    generated = loss_mask.nonzero()
    if not len(generated):
        raise ValueError("a document without a generated token has no loss rows; leave it out of the plan")
    return max(int(generated[0]) - 2, 0)


def tail_layout(lengths: Sequence[int], firsts: Sequence[int]) -> Layout:
    """Lay documents of these lengths end to end; rows of each start at its `firsts` entry (counted within it)."""
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0)
    starts = cu_seqlens[:-1].tolist()
    rows = [torch.arange(s + f, s + n) for s, f, n in zip(starts, firsts, lengths, strict=True)]
    cu_rows = torch.tensor([0, *(len(r) for r in rows)]).cumsum(0)
    return Layout(cu_seqlens.int(), torch.cat(rows), cu_rows.int(), max(lengths), max(map(len, rows)))
