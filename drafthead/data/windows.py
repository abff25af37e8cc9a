"""Documents longer than a micro batch, cut into windows that end in loss rows.

A window is a stretch of one document with its true positions. Its loss rows are half the budget, the rest is the
context before them, so no row sees less than about half a budget of text; every loss row of the document belongs
to exactly one window. A window runs K + 1 tokens past its last loss row, because the deepest TTT step of that row
predicts there. Truncating instead would drop the end of exactly the long answers; what windows give up is
attention to what lies further back than the budget.

    tokens   0 1 2 3 4 5 6 7 8 9 10 11      rows 4..11 carry loss, budget 8, K = 1
    first        [ . . R R R . . ]          tokens 1..8, rows 4..6
    second             [ . . R R R .  . ]   and so on

Shapes: T tokens, K TTT steps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.drafters.eagle3.alignment import valid_positions
from drafthead.drafters.layout import first_loss_row


@dataclass(frozen=True)
class Window:
    """A stretch of a document.

    Attributes:
        document: index in the store.
        start, stop: its tokens, [start, stop).
        first_row, end_row: the rows that carry loss, [first_row, end_row), counted from the document's start.
        valid: K numbers of valid positions, one per TTT step.
    """

    document: int
    start: int
    stop: int
    first_row: int
    end_row: int
    valid: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def whole(document: int, loss_mask: Tensor, num_steps: int) -> Window:
    """A document as one window, whatever its length."""
    length, first = loss_mask.shape[0], first_loss_row(loss_mask)
    return Window(document, 0, length, first, length, _counts(loss_mask, first, length, num_steps))


def cut(document: int, loss_mask: Tensor, budget: int, num_steps: int) -> list[Window]:
    """The windows of a document, each at most `budget` tokens; none without a valid position.

    Args:
        document: index in the store.
        loss_mask: (T,) nonzero where the target generated the token.
        budget: tokens of a micro batch.
        num_steps: K.

    Raises:
        ValueError: the budget cannot hold a loss row and the tokens its TTT steps predict.
    """
    rows = (budget - num_steps - 1) // 2
    if rows < 1:
        raise ValueError(
            f"train.tokens_per_batch {budget} is too small for {num_steps} TTT steps; set it to {num_steps + 3} or more"
        )
    if not loss_mask.any():
        return []
    length = loss_mask.shape[0]
    if length <= budget:
        window = whole(document, loss_mask, num_steps)
        return [window] if window.valid[0] else []
    windows = []
    for first in range(first_loss_row(loss_mask), length, rows):
        end = min(first + rows, length)
        stop = min(end + num_steps + 1, length)
        counts = _counts(loss_mask, first, end, num_steps)
        if counts[0]:
            windows.append(Window(document, max(0, stop - budget), stop, first, end, counts))
    return windows


def _counts(loss_mask: Tensor, first: int, end: int, num_steps: int) -> tuple[int, ...]:
    bounds = torch.tensor([0, loss_mask.shape[0]])
    return tuple(valid_positions(loss_mask, bounds, num_steps)[:, first:end].sum(1).tolist())
