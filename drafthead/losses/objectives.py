"""What a draft distribution is punished for: five objectives, each with its gradient in closed form.

Notation, over the D draft tokens of one position: z draft logits, q = softmax(z); p the target's
probabilities at temperature 1 over its full vocabulary, read at the draft tokens (so they sum to at most
1); r = p / sum(p) the same renormalised; a = sum_d min(p_d, q_d), the probability that rejection sampling
accepts a draft drawn from q.

    forward_kl         KL(r || q)                     covers all of the target's mass
    reverse_kl         KL(q || r)                     concentrates on the target's modes
    total_variation    1 - a                          the acceptance itself; no gradient where p and q are disjoint
    lk_hybrid          w KL(r || q) + (1 - w)(1 - a)  w = exp(-3 a), held constant (arXiv 2602.23881)
    greedy_acceptance  1 - sum_d softmax(z / tau)_d p_d

The last is matched to vLLM's default, which drafts argmax(q) and accepts it with probability
p[argmax q]. argmax has no gradient; its stand-in is the softmax at tau = 0.5, sharper than q.

Writing the gradients down, instead of leaving them to autograd, lets the fused head form them while a
chunk's probabilities are at hand. Tests compare each with autograd. What depends on the target alone is
computed once per token (`Target`), whatever number of TTT steps meets it. `drafthead.losses.rows` drives
these formulas over a chunk in PyTorch, `drafthead.losses.kernels` holds the same ones for CUDA.

Shapes: B rows, D draft vocabulary.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

ObjectiveName = Literal["forward_kl", "reverse_kl", "total_variation", "lk_hybrid", "greedy_acceptance"]
OBJECTIVES: tuple[str, ...] = get_args(ObjectiveName)
LK_RATE = 3.0
GREEDY_TAU = 0.5


class Target(NamedTuple):
    """The target's side of B rows.

    Attributes:
        r: (B, D); for reverse_kl log r instead, which must survive where r underflows.
        mass: (B, 1) sum_d p_d, so that p = mass * r.
        negentropy: (B,) sum_d r_d log r_d.
    """

    r: Tensor
    mass: Tensor
    negentropy: Tensor


class Draft(NamedTuple):
    """The draft's side of B rows.

    Attributes:
        z: (B, D) logits, float32 or wider.
        best: (B, 1) argmax of z.
    """

    z: Tensor
    best: Tensor


class Scored(NamedTuple):
    """Loss per row and its gradient.

    Attributes:
        loss: (B,).
        grad_logits: (B, D), d loss / d z.
    """

    loss: Tensor
    grad_logits: Tensor


def target_side(objective: ObjectiveName, logits: Tensor, lse: Tensor) -> Target:
    """Normalise the target's logits (B, D) at the draft tokens; lse (B,) is over its full vocabulary."""
    log_r = logits.log_softmax(-1)
    draft_lse = logits.amax(-1, keepdim=True) - log_r.amax(-1, keepdim=True)
    mass = (draft_lse - lse[:, None]).exp()
    r = log_r.exp()
    return Target(log_r if objective == "reverse_kl" else r, mass, torch.linalg.vecdot(r, log_r))


def _forward_kl(draft: Draft, target: Target) -> Scored:
    # sum r (log r - log q) with log q = z - lse(z), and lse(z) read off the best token: z - log q.
    q = draft.z.softmax(-1)
    lse = (draft.z.gather(-1, draft.best) - q.gather(-1, draft.best).log())[:, 0]
    return Scored(target.negentropy - torch.linalg.vecdot(target.r, draft.z) + lse, q.sub_(target.r))


def _reverse_kl(draft: Draft, target: Target) -> Scored:
    log_q = draft.z.log_softmax(-1)
    q = log_q.exp()
    ratio = log_q.sub_(target.r)  # log q - log r
    loss = torch.linalg.vecdot(q, ratio)
    return Scored(loss, ratio.sub_(loss[:, None]).mul_(q))


def _total_variation(draft: Draft, target: Target) -> Scored:
    # d a / d q_d = 1 where q_d < p_d; through the softmax's Jacobian.
    q, p = draft.z.softmax(-1), target.mass * target.r
    accepted = torch.minimum(p, q).sum(-1)
    gaining = torch.where(q < p, q, 0)
    return Scored(1 - accepted, q.mul_(gaining.sum(-1, keepdim=True)).sub_(gaining))


def _lk_hybrid(draft: Draft, target: Target) -> Scored:
    kl, tv = _forward_kl(draft, target), _total_variation(draft, target)
    weight = (-LK_RATE * (1 - tv.loss)).exp()
    return Scored(torch.lerp(tv.loss, kl.loss, weight), torch.lerp(tv.grad_logits, kl.grad_logits, weight[:, None]))


def _greedy_acceptance(draft: Draft, target: Target) -> Scored:
    sharp, p = (draft.z / GREEDY_TAU).softmax(-1), target.mass * target.r
    accepted = torch.linalg.vecdot(sharp, p)
    return Scored(1 - accepted, p.neg_().add_(accepted[:, None]).mul_(sharp).div_(GREEDY_TAU))


FORMULAS: dict[str, Callable[[Draft, Target], Scored]] = {
    "forward_kl": _forward_kl,
    "reverse_kl": _reverse_kl,
    "total_variation": _total_variation,
    "lk_hybrid": _lk_hybrid,
    "greedy_acceptance": _greedy_acceptance,
}
