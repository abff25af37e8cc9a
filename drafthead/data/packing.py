"""Packed micro batches: documents end to end in a token budget, never attending to one another.

The plan of an epoch is a pure function of the windows' lengths (see data.windows), the seed and the
epoch: a list of micro batches that every rank computes alike. Optimiser step s takes the next `ranks x
accumulation` of them, and rank r those at r, r + ranks, ... So the data of a step does not depend on how
many ranks share it, and resuming needs no more than the step number. There is no padding at all: a batch
is as long as its documents, at most the budget. Windows are placed first-fit into a few open batches; a
perfect packing would fill budgets tighter but tie their order to their lengths. What only the loss reads
is kept for the rows that lead to one (see drafters.layout).

Shapes: T tokens in the batch, R loss rows, S documents, N aux layers, H hidden.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from drafthead.drafters.layout import Layout, tail_layout
from drafthead.data.store import States
from drafthead.data.windows import Window

_OPEN_BATCHES = 8


@dataclass(frozen=True)
class PackedBatch:
    """One micro batch.

    Attributes:
        ids: prompt ids of the S documents (a document's window counts as one).
        layout: documents and loss rows.
        input_ids: (T,) int64.
        positions: (T,) int64, the target's own.
        aux: (T, N * H), aux layers ascending.
        last_hidden: (R, H), input of the target's final norm.
        loss_mask: (R,) bool.
        counted: (R,) bool, rows whose loss this batch counts; the others only hold what those predict.
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
    counted: Tensor
    argmax: Tensor
    lse: Tensor

    @property
    def row_ids(self) -> Tensor:
        """(R,) token ids of the rows."""
        return self.input_ids[self.layout.rows]

    def to(self, device: torch.device, dtype: torch.dtype) -> "PackedBatch":
        """The batch on a device, its states in the compute type."""
        moved = {name: getattr(self, name).to(device, non_blocking=True) for name in _INDEX_FIELDS}
        states = {name: getattr(self, name).to(device, dtype, non_blocking=True) for name in _STATE_FIELDS}
        return PackedBatch(ids=self.ids, layout=self.layout.to(device), **moved, **states)

    def pinned(self) -> "PackedBatch":
        """The batch in page-locked host memory."""
        return replace(self, **{name: getattr(self, name).pin_memory() for name in (*_INDEX_FIELDS, *_STATE_FIELDS)})


_STATE_FIELDS = ("aux", "last_hidden")
_INDEX_FIELDS = ("input_ids", "positions", "loss_mask", "counted", "argmax", "lse")


def plan_stream(
    states: States, windows: Sequence[Window], budget: int, seed: int, epochs: int
) -> list[list[Window]]:
    """The micro batches of all epochs: windows are shuffled within the groups of the states, group after group.

    Args:
        states: their groups and offsets are read, nothing else.
        windows: of all documents, in their order.
        budget: tokens per micro batch.
        seed: of the run.
        epochs: passes over the data.

    Returns:
        Micro batches in order, documents counted on through the epochs as the states do.
    """
    documents = [window.document for window in windows]
    bounds = [(bisect_left(documents, g.start), bisect_left(documents, g.stop)) for g in states.groups]
    return [
        [replace(window, document=window.document + states.offset(epoch)) for window in batch]
        for epoch in range(epochs)
        for group, (start, stop) in enumerate(bounds)
        for batch in plan_epoch(windows[start:stop], budget, seed, epoch, group)
    ]


def plan_epoch(
    windows: Sequence[Window], budget: int, seed: int, epoch: int, group: int = 0
) -> list[list[Window]]:
    """Shuffle windows and pack them.

    Args:
        windows: of all documents, or of those of one group.
        budget: tokens per micro batch.
        seed: of the run.
        epoch: number of the pass over the data.
        group: number of the group in the epoch.

    Returns:
        Micro batches in order.
    """
    order = np.random.default_rng((seed, epoch, group)).permutation(len(windows)).tolist()
    closed: list[list[Window]] = []
    open_batches: list[tuple[list[Window], int]] = []
    for window in (windows[i] for i in order):
        length = window.num_tokens
        for i, (members, used) in enumerate(open_batches):
            if used + length <= budget:
                open_batches[i] = ([*members, window], used + length)
                break
        else:
            if len(open_batches) == _OPEN_BATCHES:
                fullest = max(range(_OPEN_BATCHES), key=lambda i: open_batches[i][1])
                closed.append(open_batches.pop(fullest)[0])
            open_batches.append(([window], length))
    return closed + [members for members, _ in open_batches]


def pack(store: States, windows: Sequence[Window]) -> PackedBatch:
    """Read windows from the store and lay them end to end."""
    spans = [slice(w.start, w.stop) for w in windows]
    sequences = [store[w.document] for w in windows]
    rows = [slice(w.first_row, w.stop) for w in windows]

    def cat(name: str, slices: list[slice]) -> Tensor:
        return torch.cat([getattr(s, name)[part] for s, part in zip(sequences, slices, strict=True)])

    def teachers(name: str) -> Tensor:
        """Teacher rows are stored from the sequence's first one on; a loss row before it is nobody's teacher: zeros."""
        parts = []
        for s, w in zip(sequences, windows, strict=True):
            missing = max(s.first_teacher_row - w.first_row, 0)
            assert missing <= 1, "teacher rows not stored"
            stored = getattr(s, name)
            first = w.first_row + missing - s.first_teacher_row
            parts += [stored.new_zeros(missing, *stored.shape[1:]), stored[first : w.stop - s.first_teacher_row]]
        return torch.cat(parts)

    layers = [
        torch.cat([s.aux[layer_id][span] for layer_id in store.aux_layer_ids], dim=-1) for s, span in zip(sequences, spans, strict=True)
    ]
    return PackedBatch(
        ids=tuple(s.id for s in sequences),
        layout=tail_layout([w.num_tokens for w in windows], [w.first_row - w.start for w in windows]),
        input_ids=cat("input_ids", spans).long(),
        positions=torch.cat([torch.arange(w.start, w.stop) for w in windows]),
        aux=torch.cat(layers),
        last_hidden=teachers("last_hidden"),
        loss_mask=cat("loss_mask", rows).bool(),
        counted=torch.cat([torch.arange(w.first_row, w.stop) < w.end_row for w in windows]),
        argmax=teachers("argmax").long(),
        lse=teachers("lse"),
    )
