"""Packed micro batches: documents end to end in a token budget, never attending to one another.

The plan of an epoch is a pure function of the document lengths, the seed and the epoch: a list of micro
batches that every rank computes alike. Optimiser step s takes the next `ranks x accumulation` of them,
and rank r those at r, r + ranks, ... So the data of a step does not depend on how many ranks share it,
and resuming needs no more than the step number. There is no padding at all: a batch is as long as its
documents, at most the budget. Documents are placed first-fit into a few open batches; a perfect packing
would fill budgets tighter but tie the order of documents to their lengths.

What only the loss reads is kept for the rows that lead to one (see core.layout).

Shapes: T tokens in the batch, R loss rows, S documents, N taps, H hidden.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from drafthead.core.layout import Layout, first_loss_row, tail_layout
from drafthead.data.store import StateStore

_OPEN_BATCHES = 8


@dataclass(frozen=True)
class PackedBatch:
    """One micro batch.

    Attributes:
        ids: prompt ids of the S documents.
        layout: documents and loss rows.
        input_ids: (T,) int64.
        positions: (T,) int64, the target's own.
        aux: (T, N * H), taps ascending.
        last_hidden: (R, H), input of the target's final norm.
        loss_mask: (R,) bool.
        argmax: (R,) int64, the target's most likely next token.
        lse: (R,) float32, log-sum-exp of the target's logits over its full vocabulary.
    """

    ids: tuple[str, ...]
    layout: Layout
    input_ids: Tensor
    positions: Tensor
    aux: Tensor
    last_hidden: Tensor
    loss_mask: Tensor
    argmax: Tensor
    lse: Tensor

    @property
    def row_ids(self) -> Tensor:
        """(R,) token ids of the rows."""
        return self.input_ids[self.layout.rows]

    def to(self, device: torch.device, dtype: torch.dtype) -> "PackedBatch":
        """The batch on a device, its states in the compute type."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in _INDEX_FIELDS}
        states = {name: getattr(self, name).to(device, dtype, non_blocking=True) for name in ("aux", "last_hidden")}
        return PackedBatch(ids=self.ids, layout=self.layout.to(device), **moved, **states)


_INDEX_FIELDS = ("input_ids", "positions", "loss_mask", "argmax", "lse")


def check_lengths(lengths: Sequence[int], budget: int) -> None:
    """Refuse documents that no batch can hold.

    Raises:
        ValueError: a document is longer than the budget.
    """
    longest = max(lengths)
    if longest > budget:
        raise ValueError(
            f"the longest sequence has {longest} tokens but train.tokens_per_batch is {budget}; "
            f"set train.tokens_per_batch to {longest} or more"
        )


def plan_epoch(lengths: Sequence[int], budget: int, seed: int, epoch: int) -> list[list[int]]:
    """Shuffle documents and pack them.

    Args:
        lengths: tokens per document.
        budget: tokens per micro batch.
        seed: of the run.
        epoch: number of the pass over the data.

    Returns:
        Micro batches in order, each a list of document indices.
    """
    order = np.random.default_rng((seed, epoch)).permutation(len(lengths)).tolist()
    closed: list[list[int]] = []
    open_batches: list[tuple[list[int], int]] = []
    for document in order:
        length = lengths[document]
        for i, (members, used) in enumerate(open_batches):
            if used + length <= budget:
                open_batches[i] = ([*members, document], used + length)
                break
        else:
            if len(open_batches) == _OPEN_BATCHES:
                fullest = max(range(_OPEN_BATCHES), key=lambda i: open_batches[i][1])
                closed.append(open_batches.pop(fullest)[0])
            open_batches.append(([document], length))
    return closed + [members for members, _ in open_batches]


def pack(store: StateStore, documents: Sequence[int]) -> PackedBatch:
    """Read documents from the store and lay them end to end.

    Raises:
        ValueError: the target generated nothing in a document.
    """
    sequences = [store[i] for i in documents]
    firsts = [first_loss_row(s.loss_mask) for s in sequences]
    tails = list(zip(sequences, firsts, strict=True))
    return PackedBatch(
        ids=tuple(s.id for s in sequences),
        layout=tail_layout([s.num_tokens for s in sequences], firsts),
        input_ids=torch.cat([s.input_ids for s in sequences]).long(),
        positions=torch.cat([torch.arange(s.num_tokens) for s in sequences]),
        aux=torch.cat([torch.cat([s.aux[tap] for tap in store.tap_ids], dim=-1) for s in sequences]),
        last_hidden=torch.cat([s.last_hidden[first:] for s, first in tails]),
        loss_mask=torch.cat([s.loss_mask[first:] for s, first in tails]).bool(),
        argmax=torch.cat([s.argmax[first:] for s, first in tails]).long(),
        lse=torch.cat([s.lse[first:] for s, first in tails]),
    )
