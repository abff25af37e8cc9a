"""Acceptance on the validation split, predicted by replaying drafting rounds over the target's own text.

Answers that loop are left out, by the rule by which evaluation leaves them out: the checkpoint that is picked here
is to be the one that evaluation would pick.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from drafthead.data.packing import PackedBatch
from drafthead.data.responses import loops
from drafthead.data.store import States
from drafthead.data.windows import Window, whole
from drafthead.drafters.eagle3.alignment import valid_positions
from drafthead.drafters.replay import Acceptance, empty_acceptance, last_answer, match_text, replay
from drafthead.training.objective import FrozenTarget, score


@dataclass(frozen=True)
class Validation:
    """Result of a pass over the validation split.

    Attributes:
        loss: mean loss of the first TTT step per position; NaN when nothing was replayed.
        acceptance: pooled counters of the replayed rounds.
    """

    loss: float
    acceptance: Acceptance


def judged(store: States, num_steps: int) -> list[Window]:
    """The validation documents that are replayed, whole, since rounds cross windows: all with an answer, not looping.

    Args:
        store: of the validation split; states are not read.
        num_steps: TTT steps.
    """
    texts = (store.tokens(i) for i in range(len(store)))
    return [
        whole(i, mask, num_steps)
        for i, (ids, mask) in enumerate(texts)
        if mask.any() and not loops(ids[last_answer(mask)])
    ]


def replayable(loss_mask: Tensor) -> Tensor:
    """(T,) bool of one document: generated tokens and whatever the target said after its last one."""
    generated = loss_mask.bool()
    after_last = generated.flip(0).long().cumsum(0).flip(0) == 0
    return generated | after_last


@torch.no_grad()
def validate(
    objective: nn.Module, num_steps: int, target: FrozenTarget, batches: Iterable[PackedBatch], num_drafts: int,
    over_ranks: Callable[[Tensor], Tensor],
) -> Validation:  # fmt: skip
    """Replay validation documents at `num_drafts` draft tokens.

    Args:
        objective: a `TTTObjective` over the weights to judge.
        num_steps: TTT steps it unrolls.
        target: frozen tensors.
        batches: T = 0 texts of the target, each continued past its stop.
        num_drafts: K to be served.
        over_ranks: sums a tensor over the ranks that share the batches.
    """
    total, counted, acceptance = 0.0, 0, empty_acceptance(num_drafts)
    for batch in batches:
        spans = list(pairwise(batch.layout.cu_rows.tolist()))
        text = torch.cat([replayable(batch.loss_mask[a:b]) for a, b in spans])
        valid = valid_positions(text, batch.layout.cu_rows, num_steps)
        scale = torch.zeros(num_steps, dtype=torch.float32, device=batch.row_ids.device)
        scored = score(objective, batch, target, valid, scale)
        total += float(scored.step_sums[0])
        counted += int(valid[0].sum())
        matches = match_text(scored.predictions, target.target_ids, batch.row_ids)[:num_drafts].cpu()
        said = batch.loss_mask.cpu()
        for a, b in spans:
            acceptance += replay(matches[:, a:b], said[a:b])
    sums = over_ranks(
        torch.tensor([total, counted, acceptance.drafts, *acceptance.accepted_per_position], dtype=torch.float64)
    )
    total, counted, drafts, *accepted = sums.tolist()
    return Validation(
        total / counted if counted else math.nan, Acceptance(int(drafts), tuple(int(n) for n in accepted))
    )
