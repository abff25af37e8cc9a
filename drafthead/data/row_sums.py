"""A sum over every stretch of rows that is read as one, so that whoever reads it knows that it is what was written.

The SHA-256 of a shard is checked by `harvest.py --verify`; training cannot hash terabytes before its first step. It
reads each sequence anyway, and adding up its bytes as 64-bit words runs at the speed of memory. A flipped bit, a page
of zeros or rows of another sequence change the sum; given up is what a cryptographic hash finds besides, such as words
that changed places.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor


def row_sum(rows: Tensor) -> int:
    """Sum of the bytes of a tensor as signed 64-bit words, modulo 2^64; bytes beyond the last whole word count too."""
    data = rows.contiguous().reshape(-1).view(torch.uint8).numpy()
    whole = len(data) // 8 * 8
    rest = np.zeros(8, np.uint8)
    rest[: len(data) - whole] = data[whole:]
    words = np.add.reduce(data[:whole].view(np.int64), dtype=np.int64)
    return int(np.add(words, rest.view(np.int64)[0], dtype=np.int64))


def sums_of(tensors: Mapping[str, Tensor], bounds: Mapping[str, Sequence[int]]) -> Tensor:
    """(S, C) int64: the sum of each of S stretches of C tensors.

    Args:
        tensors: name -> values, whose rows lie along the first axis.
        bounds: name -> S + 1 row numbers, for the C tensors to be summed in this order.
    """
    columns = [
        [row_sum(tensors[name][start:stop]) for start, stop in zip(ends, ends[1:], strict=False)]
        for name, ends in bounds.items()
    ]
    return torch.tensor(columns, dtype=torch.int64).T.contiguous()
