"""Which rows of a batch are scored together: the valid ones, by the teacher token they meet.

Shapes: K TTT steps, T tokens; C teacher tokens and R rows of a chunk.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """Valid rows that meet a run of teacher tokens.

    Attributes:
        tokens: (C,) the teacher's.
        rows: (R,) index into the K * T (step, index) pairs.
        met: (R,) which of `tokens` each row meets, ascending.
    """

    tokens: Tensor
    rows: Tensor
    met: Tensor


def chunks(valid: Tensor, max_rows: int) -> Iterator[Chunk]:
    """Cut the rows of `valid` (K, T) so that each teacher token lies in one chunk.

    Step k at index t meets teacher token t + 1 + k. A chunk has at most max(max_rows, K) rows.
    """
    step, index = valid.nonzero(as_tuple=True)
    if not len(step):
        return
    token, order = (index + 1 + step).sort(stable=True)
    rows = (step * valid.shape[1] + index)[order]
    tokens, met, counts = token.unique_consecutive(return_inverse=True, return_counts=True)
    width = max(max_rows // len(valid), 1)  # teacher tokens of a chunk; up to K rows meet each
    sizes = torch.stack([part.sum() for part in counts.split(width)]).tolist()
    pieces = zip(tokens.split(width), rows.split(sizes), met.split(sizes), strict=True)
    for number, (some_tokens, some_rows, some_met) in enumerate(pieces):
        yield Chunk(some_tokens, some_rows, some_met - number * width)
