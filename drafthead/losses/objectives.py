"""What a draft distribution is penalised for. An objective is a function of logits, named in `OBJECTIVES`.

Notation, over the D draft tokens of one row: z draft logits, q = softmax(z); p the target's probabilities over its
full vocabulary, read at the draft tokens (so they sum to at most 1); both of logits that train.temperature divides,
which the caller has done; r = p / sum(p) the target's renormalised; a = sum_d min(p_d, q_d), the probability that
rejection sampling accepts a draft drawn from q.

    forward_kl         KL(r || q)                     covers all of the target's mass
    total_variation    1 - a                          the acceptance itself; no gradient where p and q are disjoint
    lk_hybrid          w KL(r || q) + (1 - w)(1 - a)  w = exp(-3 a), held constant (arXiv 2602.23881)
    cross_entropy      -log q at the draft token with the largest p, the label of greedy text

total_variation is matched to drafts that are sampled from q (draft_sample_method: probabilistic), accepted with
probability a.

Any objective, and any mixture of them, is differentiated by autograd, a block of rows at a time. A gradient written
down takes 40 to 70 % of the time: that of forward_kl, the default, stands below, and in `drafthead.losses.kernels` for
CUDA. Both are optional; tests hold them to the function.

Shapes: B rows of a block, C teacher tokens and R draft rows of a chunk, D draft vocabulary.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

LK_RATE = 3.0
# Of a float32 tensor: 1 MiB stays in the caches of a CPU's cores; on a GPU 64 MiB make launches short beside the work.
BLOCK_ELEMENTS = {"cpu": 2**18, "cuda": 2**24}


@dataclass(frozen=True)
class Target:
    """What an objective reads of the target, for B rows.

    Attributes:
        log_r: (B, D) log of the target's probabilities, renormalised over the draft tokens.
        mass: (B, 1) sum_d p_d, the target's mass on the draft tokens.
    """

    log_r: Tensor
    mass: Tensor

    @cached_property
    def r(self) -> Tensor:
        """(B, D)."""
        return self.log_r.exp()

    @property
    def p(self) -> Tensor:
        """(B, D)."""
        return self.mass * self.r


def forward_kl(z: Tensor, target: Target) -> Tensor:
    return (target.r * (target.log_r - z.log_softmax(-1))).sum(-1)


def total_variation(z: Tensor, target: Target) -> Tensor:
    return 1 - torch.minimum(target.p, z.softmax(-1)).sum(-1)


def lk_hybrid(z: Tensor, target: Target) -> Tensor:
    rejected = total_variation(z, target)
    weight = (-LK_RATE * (1 - rejected.detach())).exp()
    return weight * forward_kl(z, target) + (1 - weight) * rejected


def cross_entropy(z: Tensor, target: Target) -> Tensor:
    return -z.log_softmax(-1).gather(-1, target.log_r.argmax(-1, keepdim=True))[:, 0]


# From logits (B, D), float32 or wider, and the target to the loss of each row (B,), differentiable in the logits.
LossFunction = Callable[[Tensor, Target], Tensor]
ANALYTIC_OBJECTIVE = "forward_kl"  # its gradient is computed in closed form, here and in Triton kernels
Objective = str | Mapping[Any, float]  # a name, or the coefficients of a mixture of named ones
OBJECTIVES: dict[str, LossFunction] = {
    function.__name__: function for function in (forward_kl, total_variation, lk_hybrid, cross_entropy)
}


def loss_function(objective: Objective) -> LossFunction:
    """The function of a name, or the weighted sum of those of a mixture; the recipe knows which names there are."""
    if isinstance(objective, str):
        return OBJECTIVES[objective]
    return lambda z, target: torch.stack([c * OBJECTIVES[name](z, target) for name, c in objective.items()]).sum(0)


def reads_mass(objective: Objective) -> bool:
    """Whether it depends on how much of the target's mass the draft tokens have; the others renormalise it."""
    names = [objective] if isinstance(objective, str) else objective
    return not {"forward_kl", "cross_entropy"}.issuperset(names)


class TargetRows(NamedTuple):
    """The target's side of C teacher tokens, computed once for all draft positions that meet them.

    Attributes:
        values: (C, D) r where the gradient is written down, else log r, which survives where r underflows.
        mass: (C, 1) the target's mass on the draft tokens.
        negentropy: (C,) sum_d r_d log r_d.
    """

    values: Tensor
    mass: Tensor
    negentropy: Tensor


class RowLoss(NamedTuple):
    """Loss of each row of a chunk (R,) and the draft's most likely token (R,)."""

    loss: Tensor
    best: Tensor


def prepare_target(objective: Objective, logits: Tensor, lse: Tensor) -> TargetRows:
    """The target's side of C tokens.

    Args:
        objective: objective that the target is prepared for.
        logits: (C, D) logits of the target at the draft tokens; overwritten.
        lse: (C,) log-sum-exp over the target's full vocabulary.
    """
    draft_lse, negentropy = [], []
    for block in _blocks(logits):
        log_r = logits[block].log_softmax(-1)
        draft_lse.append(logits[block].amax(-1) - log_r.amax(-1))
        r = log_r.exp()
        negentropy.append(torch.linalg.vecdot(r, log_r))
        logits[block] = r if objective == ANALYTIC_OBJECTIVE else log_r
    return TargetRows(logits, (torch.cat(draft_lse) - lse).exp()[:, None], torch.cat(negentropy))


def score_rows(
    objective: Objective, logits: Tensor, target: TargetRows, met: Tensor, scale: Tensor, grad: Tensor | None
) -> RowLoss:
    """Score R rows, a block at a time: the passes of an objective find its logits in the processor's cache.

    Args:
        objective: name of the objective, or coefficients of a mixture.
        logits: (R, D) logits of the draft, float32 or wider.
        target: target rows of C tokens, prepared for this objective.
        met: (R,) index of the target row that each draft row is compared with.
        scale: (R,) factor of each row's gradient.
        grad: (R, D) receives scale * d loss / d logits; may be `logits`. None: no gradient.
    """
    losses, best = [], []
    for block in _blocks(logits):
        z, rows = logits[block].to(target.values.dtype), met[block]
        token, values = argmax(z), target.values.index_select(0, rows)
        if objective == ANALYTIC_OBJECTIVE:
            cross_entropy, gradient = _cross_entropy_written(z, token[:, None], values)
            loss = cross_entropy + target.negentropy[rows]
        else:
            loss, gradient = _by_autograd(objective, z, Target(values, target.mass[rows]))
        if grad is not None:
            torch.mul(gradient, scale[block, None], out=grad[block])
        losses.append(loss)
        best.append(token)
    return RowLoss(torch.cat(losses), torch.cat(best))


def argmax(z: Tensor) -> Tensor:
    """(B,) argmax of (B, D), the first of equals. Torch scans indices one by one: narrow the row down first."""
    width = 128
    if z.is_cuda or z.shape[1] % width:
        return z.argmax(-1)
    parts = z.unflatten(-1, (-1, width))  # (B, D / width, width)
    part = parts.amax(-1).argmax(-1)
    return part * width + parts[torch.arange(len(z)), part].argmax(-1)


def _blocks(logits: Tensor) -> list[slice]:
    rows = max(BLOCK_ELEMENTS[logits.device.type] // logits.shape[1], 1)
    return [slice(start, start + rows) for start in range(0, len(logits), rows)]


# Loss (B,) of the rows of a block and its gradient with respect to their logits z (B, D).


def _by_autograd(objective: Objective, z: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        z = z.detach().requires_grad_()
        loss = loss_function(objective)(z, target)
        (grad,) = torch.autograd.grad(loss.sum(), z)
    return loss.detach(), grad


def _cross_entropy_written(z: Tensor, best: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
    # -sum r log q, forward_kl less its negentropy: log q = z - lse(z), and lse(z) = z - log q at the best token (B, 1).
    q = z.softmax(-1)
    lse = (z.gather(-1, best) - q.gather(-1, best).log())[:, 0]
    return lse - torch.linalg.vecdot(r, z), q.sub_(r)
