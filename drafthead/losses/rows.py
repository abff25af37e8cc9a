"""Loss, gradient and prediction of every row of a chunk: the PyTorch form.

Rows are scored a block at a time, so that the half dozen passes an objective makes over its logits find
them in the processor's cache: the matrix products around it then set the pace. `drafthead.losses.kernels`
has the same two functions for CUDA.

Shapes: C teacher tokens, R draft rows, D draft vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from drafthead.losses.objectives import FORMULAS, Draft, ObjectiveName, Target, target_side

BLOCK_ELEMENTS = 2**20  # 4 MiB of float32: larger leaves the caches, smaller waits on threads more often


class RowLoss(NamedTuple):
    """What a chunk of rows comes to.

    Attributes:
        loss: (R,).
        best: (R,) the draft's most likely token.
    """

    loss: Tensor
    best: Tensor


def prepare_target(objective: ObjectiveName, logits: Tensor, lse: Tensor) -> Target:
    """The target's side of C tokens.

    Args:
        objective: whose needs it serves.
        logits: (C, D) at the draft tokens; overwritten.
        lse: (C,) log-sum-exp over the target's full vocabulary.
    """
    sides = []
    for block in _blocks(logits):
        side = target_side(objective, logits[block], lse[block])
        logits[block] = side.r
        sides.append(side)
    return Target(logits, torch.cat([side.mass for side in sides]), torch.cat([side.negentropy for side in sides]))


def score_rows(
    objective: ObjectiveName, logits: Tensor, target: Target, met: Tensor, scale: Tensor, grad: Tensor | None
) -> RowLoss:
    """Score R rows.

    Args:
        objective: what the loss is.
        logits: (R, D) of the draft, float32 or wider.
        target: of C tokens.
        met: (R,) which of them each row is compared with.
        scale: (R,) factor of each row's gradient.
        grad: (R, D) receives scale * d loss / d logits; may be `logits`. None: not wanted.
    """
    losses, best = [], []
    for block in _blocks(logits):
        z, rows = logits[block], met[block]
        token = argmax(z)
        scored = FORMULAS[objective](Draft(z, token[:, None]), Target(*(part.index_select(0, rows) for part in target)))
        if grad is not None:
            torch.mul(scored.grad_logits, scale[block, None], out=grad[block])
        losses.append(scored.loss)
        best.append(token)
    return RowLoss(torch.cat(losses), torch.cat(best))


def argmax(z: Tensor, width: int = 128) -> Tensor:
    """(B,) argmax of (B, D), the first of equals. Torch scans indices one by one: narrow the row down first."""
    if z.is_cuda or z.shape[1] % width:
        return z.argmax(-1)
    parts = z.unflatten(-1, (-1, width))  # (B, D / width, width)
    part = parts.amax(-1).argmax(-1)
    inside = torch.take_along_dim(parts, part[:, None, None], 1)[:, 0].argmax(-1)
    return part * width + inside


def _blocks(logits: Tensor) -> list[slice]:
    rows = max(BLOCK_ELEMENTS // logits.shape[1], 1)
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]
