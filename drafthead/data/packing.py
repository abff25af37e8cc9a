"""Packed micro batches: documents, or windows of long ones, end to end in a token budget, each attending to itself.

A window is a stretch of one document with its true positions. Its loss rows are half
the budget; every loss row of the document belongs to exactly one window. A window runs past its last loss row as far as
the drafter's loss looks ahead, and begins with the document, up to twice the budget in all: context takes a fraction of
a loss row's memory. So a document of up to two budgets is trained alike whole and in windows, which may be spread over
ranks; in a longer one the last rows do not attend to its first tokens. Truncating instead would drop the end of exactly
the long responses. Of a head with a sliding window only what its rows depend on is read. With a loss that looks two
tokens ahead:

    tokens   0 1 2 3 4 5 6 7 8 9 10 11      rows 4..11 carry loss, budget 8
    first    [ . . . . R R R . . ]          tokens 0..8, rows 4..6
    second   [ . . . . . . . R R R .  .     tokens 0..11, rows 7..9, and so on

The plan of an epoch is a pure function of the windows' lengths, the seed and the epoch: a list of micro batches that
every rank computes alike. Optimiser step s takes the next `ranks x accumulation` of them, and rank r those at r,
r + ranks, ... So the data of a step does not depend on how many ranks share it, and resuming needs no more than the
step number. Micro batches that ranks compute side by side cost about the same (`leveled`). There is no padding at all:
a batch is as long as its documents, at most the budget, or is one window that exceeds it. Windows are placed first-fit
into a few open batches; a perfect packing would fill budgets tighter but tie their order to their lengths.

Shapes: T tokens, R rows, K draft positions.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from drafthead.data.spool import States
from drafthead.drafters.base import Drafter
from drafthead.drafters.batch import PackedBatch, tail_layout

_OPEN_BATCHES = 8
# Optimiser steps whose micro batches change places; with 8 ranks, 3 % of their time is spent waiting or less.
_POOL = 32
_CONTEXT = 3  # tokens that only give context for the memory of a row with loss; more where no step is recomputed
_ROW_COST = 12  # of a row with loss at all positions, in tokens that only give context (tests/gpu, gpt-oss-120b)


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of a document.

    Attributes:
        document: index in the store.
        start, stop: tokens of the window, [start, stop) of the document.
        first_row, end_row: rows whose loss the window counts, [first_row, end_row) of the document.
        valid: how many rows carry loss at each of the K draft positions.
        draw: the epoch that these rows were drawn for, where a drafter draws them.
    """

    document: int
    start: int
    stop: int
    first_row: int
    end_row: int
    valid: tuple[int, ...]
    draw: int = 0

    @property
    def num_tokens(self) -> int:
        return self.stop - self.start


def whole(document: int, loss_mask: Tensor, drafter: Drafter) -> Window:
    """All loss rows of a document as one window, whatever its length.

    Args:
        document: index in the store.
        loss_mask: (T,) nonzero where a token is learned.
        drafter: drafter that plans which rows carry loss.
    """
    length, first = loss_mask.shape[0], drafter.first_row(loss_mask)
    valid = tuple(drafter.loss_rows(loss_mask)[:, first:].sum(1).tolist())
    return Window(document, max(0, first - drafter.reach), length, first, length, valid)


def split_windows(document: int, loss_mask: Tensor, budget: int, drafter: Drafter, draw: int = 0) -> list[Window]:
    """The windows of a document; none without a row that carries loss.

    Args:
        document: index in the store.
        loss_mask: (T,) nonzero where a token is learned.
        budget: tokens of a micro batch.
        drafter: drafter that plans which rows carry loss.
        draw: number of the epoch that rows are drawn for.

    Raises:
        ValueError: the budget cannot hold a loss row and what its loss looks ahead to.
    """
    rows = (budget - drafter.lookahead) // 2
    if rows < 1:
        raise ValueError(
            f"train.tokens_per_batch {budget} is too small for {drafter.num_positions} draft positions; set it to "
            f"{drafter.lookahead + 2} or more"
        )
    if not loss_mask.any():
        return []
    length, begin = loss_mask.shape[0], drafter.first_row(loss_mask)
    alone = length - max(0, begin - drafter.reach) <= budget
    rows = length if alone else max(rows, budget - drafter.lookahead - drafter.reach)
    windows, scored = [], drafter.trained_rows(loss_mask, draw)
    for first in range(begin, length, rows):
        end = min(first + rows, length)
        stop = min(end + drafter.lookahead, length)
        valid = tuple(scored[:, first:end].sum(1).tolist())
        if valid[0]:
            start = max(0, first - drafter.reach, stop - window_tokens(budget, rows))
            windows.append(Window(document, start, stop, first, end, valid, draw))
    return windows


def window_tokens(budget: int, rows: int) -> int:
    """Most tokens of a window with so many loss rows: what the others of a budget leave is context."""
    return budget + (_CONTEXT - 1) * max(0, budget - rows)


def plan_stream(
    states: States, windows: Sequence[Window], budget: int, seed: int, epochs: int, per_step: int = 1
) -> list[list[Window]]:
    """The micro batches of all epochs: windows are shuffled within the groups of the states, group after group.

    Args:
        states: states of the split; only their groups and stride are read.
        windows: windows of all documents, in their order; of all draws, where rows are drawn anew.
        budget: tokens per micro batch.
        seed: random seed of the run.
        epochs: passes over the data.
        per_step: micro batches of an optimiser step.

    Returns:
        Micro batches in order, documents counted on through the epochs as the states do.
    """
    draws = 1 + max((window.draw for window in windows), default=0)
    stream: list[list[Window]] = []
    for epoch in range(epochs):
        epoch_windows = [window for window in windows if window.draw == epoch % draws]
        documents = [window.document for window in epoch_windows]
        for group, members in enumerate(states.groups):
            start, stop = bisect_left(documents, members.start), bisect_left(documents, members.stop)
            batches = plan_epoch(epoch_windows[start:stop], budget, seed, epoch, group)
            offset = epoch * states.epoch_stride
            for batch in leveled(batches, per_step, -len(stream) % per_step, seed):
                moved = [replace(w, document=w.document + offset) for w in batch] if offset else batch
                stream.append(moved)
    return stream


def leveled(batches: list[list[Window]], per_step: int, first: int, seed: int) -> list[list[Window]]:
    """Reorder micro batches so that those of one optimiser step cost about the same: ranks wait for the slowest.

    Batches hold equal numbers of tokens, but a row that carries loss costs as much as `_ROW_COST` that do not. Within
    pools of steps they are sorted by cost and cut into steps, which are shuffled. What it gives up: the rows of a
    step's batches are no longer independent of one another. With one batch a step nothing changes.

    Args:
        batches: micro batches in the order of the plan.
        per_step: micro batches of an optimiser step.
        first: index at which the first whole step begins; batches outside of whole steps stay.
        seed: random seed of the run.
    """
    if per_step == 1:
        return batches
    generator = np.random.default_rng((seed, len(batches)))
    end = first + (len(batches) - first) // per_step * per_step
    reordered = batches[:first]
    for start in range(first, end, _POOL * per_step):
        pool = sorted(batches[start : min(start + _POOL * per_step, end)], key=cost)
        for step in generator.permutation(len(pool) // per_step).tolist():
            reordered += pool[step * per_step : (step + 1) * per_step]
    return reordered + batches[max(end, first) :]


def cost(batch: Sequence[Window]) -> int:
    """Of a micro batch, in tokens that only give context."""
    return sum(_ROW_COST * sum(window.valid) // len(window.valid) + window.num_tokens for window in batch)


def plan_epoch(windows: Sequence[Window], budget: int, seed: int, epoch: int, group: int = 0) -> list[list[Window]]:
    """Shuffle windows and pack them.

    Args:
        windows: windows of all documents, or of those of one group.
        budget: tokens per micro batch.
        seed: random seed of the run.
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


def pack(
    store: States,
    windows: Sequence[Window],
    drafter: Drafter,
    whole_text: bool = False,
    pin: bool = False,
) -> PackedBatch:
    """Read windows from the store and lay them end to end.

    Args:
        store: states of the documents.
        windows: windows of the batch, in order.
        drafter: drafter that plans which rows carry loss.
        whole_text: mark rows that predict what follows the last generated token too, which replay compares with.
        pin: allocate states in page-locked memory; `pinned` moves the rest there.
    """
    sequences = [store.stored(w.document) for w in windows]
    pairs = list(zip(sequences, windows, strict=True))
    of_row, scored, teachers, offset = [], [], [], 0
    for s, w in pairs:
        token, first = torch.arange(w.first_row, w.stop), max(w.first_row, s.first_teacher_row)
        of_row.append(torch.where(token >= first, token - first + offset, -1))
        teachers.append(slice(first - s.first_teacher_row, w.stop - s.first_teacher_row))
        offset += w.stop - first
        mask = replayable(s.loss_mask) if whole_text else s.loss_mask
        rows = drafter.loss_rows(mask) if whole_text else drafter.trained_rows(mask, w.draw)
        scored.append(rows[:, w.first_row : w.stop] & (token < w.end_row))

    def joined(parts: list[list[Tensor]]) -> Tensor:
        """Documents below one another, a document's parts side by side; each byte is copied once."""
        T, widths = sum(len(first) for first, *_ in parts), [part.shape[1] for part in parts[0]]
        out = torch.empty(T, sum(widths), dtype=parts[0][0].dtype, pin_memory=pin)
        places = out.split([len(first) for first, *_ in parts])
        for place, document in zip(places, parts, strict=True):
            torch.cat(document, dim=-1, out=place)
        return out

    def tail(name: str) -> list[Tensor]:
        return [getattr(s, name)[rows] for s, rows in zip(sequences, teachers, strict=True)]

    layers = store.aux_layer_ids
    scaled = [[s.scales[layer][w.start : w.stop, None] for layer in layers] for s, w in pairs if s.scales]
    return PackedBatch(
        layout=tail_layout([w.num_tokens for w in windows], [w.first_row - w.start for w in windows]),
        input_ids=torch.cat([s.input_ids[w.start : w.stop] for s, w in pairs]).long(),
        positions=torch.cat([torch.arange(w.start, w.stop) for w in windows]),
        aux=joined([[s.aux[layer][w.start : w.stop] for layer in layers] for s, w in pairs]),
        loss_mask=torch.cat([s.loss_mask[w.first_row : w.stop] for s, w in pairs]).bool(),
        scored=torch.cat(scored, dim=1),
        of_row=torch.cat(of_row),
        last_hidden=joined([[rows] for rows in tail("last_hidden")]),
        argmax=torch.cat(tail("argmax")).long(),
        lse=torch.cat(tail("lse")),
        aux_scale=joined(scaled) if scaled else None,
    )


def replayable(loss_mask: Tensor) -> Tensor:
    """(T,) bool of one document: generated tokens, and the continuation after its last one."""
    generated = loss_mask.bool()
    after_last = generated.flip(0).long().cumsum(0).flip(0) == 0
    return generated | after_last
