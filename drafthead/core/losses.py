"""Language-model head and loss in one pass over chunks of tokens: no batch-sized logits ever exist.

For every token position j the teacher's logits over the draft vocabulary are computed once and shared
by all TTT steps (step k meets teacher j from index t = j - 1 - k). The gradient with respect to hidden
states and head weight is formed in the forward, while a chunk's probabilities are at hand, and scaled in
the backward. It costs one extra buffer of the head's size; autograd over plain logits would keep
K x T x D of them.

The objective is any of `drafthead.core.objectives`; softmax in float32 (float64 for float64 inputs).

Shapes: T tokens, K TTT steps, H hidden, D draft vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafthead.core.objectives import ObjectiveName, score_rows

CHUNK_TOKENS = 512


@dataclass(frozen=True)
class HeadLoss:
    """What the fused head returns.

    Attributes:
        loss: scalar, sum over steps and valid positions of scale[k] * l; carries the gradient.
        step_sums: (K,) unscaled sums of l, without gradient.
        predictions: (K, T) the draft's most likely index in the draft vocabulary; -1 where not computed.
    """

    loss: Tensor
    step_sums: Tensor
    predictions: Tensor


@dataclass(frozen=True)
class Teacher:
    """The target's side of the loss.

    Attributes:
        hidden: (T, H) states after the target's final norm.
        weight: (D, H) rows of the target's lm_head for the draft vocabulary, in draft order.
        lse: (T,) log-sum-exp of the target's logits over its full vocabulary.
    """

    hidden: Tensor
    weight: Tensor
    lse: Tensor


def head_loss(
    states: Tensor,
    weight: Tensor,
    teacher: Teacher,
    valid: Tensor,
    scale: Tensor,
    objective: ObjectiveName = "forward_kl",
) -> HeadLoss:
    """Draft head, softmax and loss for all TTT steps.

    Args:
        states: (K, T, H) the draft's normed hidden states.
        weight: (D, H) the draft's lm_head.
        teacher: the target's states and head rows.
        valid: (K, T) bool, from `alignment.valid_positions`.
        scale: (K,) weight of one position's loss at each step.
        objective: what l is.
    """
    needs_grad = torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)
    loss, step_sums, predictions = _FusedHeadLoss.apply(
        states, weight, teacher.hidden, teacher.weight, teacher.lse, valid, scale, objective, needs_grad
    )
    return HeadLoss(loss, step_sums, predictions)


class _FusedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight, teacher_hidden, teacher_weight, teacher_lse, valid, scale, objective, needs_grad):
        wide = torch.promote_types(states.dtype, torch.float32)
        num_steps, num_tokens, _ = states.shape
        if needs_grad:
            grad_states = torch.zeros_like(states)
            grad_weight = torch.zeros_like(weight, dtype=wide)
        step_sums = torch.zeros(num_steps, dtype=wide, device=states.device)
        predictions = torch.full((num_steps, num_tokens), -1, dtype=torch.long, device=states.device)

        for start in range(0, num_tokens, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, num_tokens)
            # Step k reads teacher row j from index j - 1 - k.
            rows = [_rows_of_step(valid[k], start - 1 - k, end - 1 - k) for k in range(num_steps)]
            if not any(len(r) for r in rows):
                continue
            teacher_logits = (teacher_hidden[start:end] @ teacher_weight.T).to(wide)
            for k, index in enumerate(rows):
                if not len(index):
                    continue
                hidden, target = states[k, index], index + 1 + k
                logits = (hidden @ weight.T).to(wide)
                predictions[k, index] = logits.argmax(-1)
                scored = score_rows(objective, logits, teacher_logits[target - start], teacher_lse[target].to(wide))
                step_sums[k] += scored.loss.sum()
                if needs_grad:
                    grad_logits = (scored.grad_logits * scale[k]).to(states.dtype)
                    grad_states[k, index] = grad_logits @ weight
                    grad_weight += grad_logits.T @ hidden
        if needs_grad:
            ctx.save_for_backward(grad_states, grad_weight)
            ctx.weight_dtype = weight.dtype
        ctx.mark_non_differentiable(step_sums, predictions)
        return (step_sums * scale).sum(), step_sums, predictions

    @staticmethod
    def backward(ctx, grad_loss, *_):
        grad_states, grad_weight = ctx.saved_tensors
        return grad_states * grad_loss, (grad_weight * grad_loss).to(ctx.weight_dtype), *[None] * 7


def _rows_of_step(valid: Tensor, start: int, end: int) -> Tensor:
    start, end = max(start, 0), max(end, 0)
    return valid[start:end].nonzero()[:, 0] + start
