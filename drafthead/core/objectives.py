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
chunk's probabilities are at hand. Tests compare each with autograd.
"""

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

ObjectiveName = Literal["forward_kl", "reverse_kl", "total_variation", "lk_hybrid", "greedy_acceptance"]
OBJECTIVES: tuple[str, ...] = get_args(ObjectiveName)
LK_RATE = 3.0
GREEDY_TAU = 0.5


class Scored(NamedTuple):
    """Loss per row and its gradient.

    Attributes:
        loss: (C,).
        grad_logits: (C, D), d loss / d z.
    """

    loss: Tensor
    grad_logits: Tensor


def score_rows(objective: ObjectiveName, logits: Tensor, teacher_logits: Tensor, teacher_lse: Tensor) -> Scored:
    """Score C positions.

    Args:
        objective: one of `OBJECTIVES`.
        logits: (C, D) draft logits z, float32 or wider.
        teacher_logits: (C, D) target logits at the draft tokens.
        teacher_lse: (C,) log-sum-exp of the target's logits over its full vocabulary.
    """
    log_q = logits.log_softmax(-1)
    if objective == "forward_kl":
        return _forward_kl(log_q, teacher_logits.log_softmax(-1))
    if objective == "reverse_kl":
        return _reverse_kl(log_q, teacher_logits.log_softmax(-1))
    p = (teacher_logits - teacher_lse[:, None]).exp()
    if objective == "total_variation":
        return _total_variation(log_q.exp(), p)
    if objective == "lk_hybrid":
        kl, tv = _forward_kl(log_q, teacher_logits.log_softmax(-1)), _total_variation(log_q.exp(), p)
        weight = (-LK_RATE * (1 - tv.loss)).exp()
        return Scored(
            weight * kl.loss + (1 - weight) * tv.loss,
            weight[:, None] * kl.grad_logits + (1 - weight[:, None]) * tv.grad_logits,
        )
    return _greedy_acceptance(logits, p)


def _forward_kl(log_q: Tensor, log_r: Tensor) -> Scored:
    r = log_r.exp()
    return Scored((r * (log_r - log_q)).sum(-1), log_q.exp() - r)


def _reverse_kl(log_q: Tensor, log_r: Tensor) -> Scored:
    q, ratio = log_q.exp(), log_q - log_r
    loss = (q * ratio).sum(-1)
    return Scored(loss, q * (ratio - loss[:, None]))


def _total_variation(q: Tensor, p: Tensor) -> Scored:
    # d a / d q_d = 1 where q_d < p_d; through the softmax's Jacobian.
    gains = (q < p).to(q.dtype)
    accepted = torch.minimum(p, q).sum(-1)
    return Scored(1 - accepted, -_through_softmax(q, gains))


def _greedy_acceptance(logits: Tensor, p: Tensor) -> Scored:
    sharp = (logits / GREEDY_TAU).softmax(-1)
    return Scored(1 - (sharp * p).sum(-1), -_through_softmax(sharp, p) / GREEDY_TAU)


def _through_softmax(q: Tensor, grad_q: Tensor) -> Tensor:
    """Gradient with respect to logits from the gradient with respect to their softmax."""
    return q * (grad_q - (q * grad_q).sum(-1, keepdim=True))
