"""Language-model head and loss in one pass over chunks of tokens: no batch-sized logits ever exist.

Only rows that count are computed: (step, index) pairs of `valid`, ordered by the teacher token they meet
(step k meets teacher j from index t = j - 1 - k), so that all steps share one chunk of the teacher's
probabilities and each matrix product takes the rows of all steps at once. The gradient with respect to
hidden states and head weight is formed in the forward, while a chunk's logits are at hand, and scaled in
the backward. It costs one extra buffer of the head's size; autograd over plain logits would keep
K x T x D of them. Giving that up would mean recomputing the logits in the backward, a third more work.

The objective is any of `drafthead.losses.objectives`; softmax in float32 (float64 for float64 inputs). On
CUDA the passes over logits are Triton kernels; elsewhere PyTorch, block by block.

Shapes: T tokens, K TTT steps, H hidden, D draft vocabulary, R rows of a chunk, C teacher tokens of it.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafthead.losses import rows
from drafthead.losses.chunks import chunks
from drafthead.losses.objectives import FORMULAS, ObjectiveName, Target

CHUNK_ROWS = {"cpu": 1024, "cuda": 4096}  # rows of logits that exist at a time


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

    Raises:
        ValueError: there is no such objective, or, on CUDA, no kernel has its formula.
    """
    if objective not in FORMULAS:
        raise ValueError(f"objective {objective!r} is not known; choose one of {', '.join(FORMULAS)}")
    needs_grad = torch.is_grad_enabled() and (states.requires_grad or weight.requires_grad)
    loss, step_sums, predictions = _FusedHeadLoss.apply(
        states, weight, teacher.hidden, teacher.weight, teacher.lse, valid, scale, objective, needs_grad
    )
    return HeadLoss(loss, step_sums, predictions)


class _FusedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight, teacher_hidden, teacher_weight, teacher_lse, valid, scale, objective, needs_grad):
        wide = torch.promote_types(states.dtype, torch.float32)
        form = _row_form(states)
        hidden = states.flatten(0, 1)  # (K * T, H)
        losses = hidden.new_zeros(len(hidden), dtype=wide)
        predictions = torch.full((len(hidden),), -1, device=states.device)
        row_scale = scale.to(wide).repeat_interleave(states.shape[1])
        grad_hidden = torch.zeros_like(hidden if needs_grad else hidden[:0])
        grad_weight = torch.zeros_like(weight if needs_grad else weight[:0], dtype=wide)

        todo = list(chunks(valid, CHUNK_ROWS[states.device.type]))
        teacher_buffer = _buffer([chunk.tokens for chunk in todo], teacher_weight, wide)
        logits_buffer = _buffer([chunk.rows for chunk in todo], weight, wide)
        # The gradient overwrites the logits, unless the products want it in another type.
        grad_buffer = logits_buffer if wide == weight.dtype else torch.empty_like(logits_buffer, dtype=weight.dtype)
        for chunk in todo:
            teacher_logits = _product(teacher_hidden[chunk.tokens], teacher_weight.T, teacher_buffer)
            target = form.prepare_target(objective, teacher_logits, teacher_lse[chunk.tokens].to(wide))
            inputs = hidden[chunk.rows]
            logits = _product(inputs, weight.T, logits_buffer)
            grad_logits = grad_buffer[: len(inputs)] if needs_grad else None
            losses[chunk.rows], predictions[chunk.rows] = form.score_rows(
                objective, logits, target, chunk.met, row_scale[chunk.rows], grad_logits
            )
            if grad_logits is not None:
                grad_hidden[chunk.rows] = grad_logits @ weight
                _add_product(grad_weight, grad_logits.T, inputs)

        if needs_grad:
            ctx.gradients = grad_hidden.view_as(states), grad_weight
            ctx.weight_dtype = weight.dtype
        step_sums = losses.view(valid.shape).sum(1)
        predictions = predictions.view(valid.shape)
        ctx.mark_non_differentiable(step_sums, predictions)
        return (step_sums * scale).sum(), step_sums, predictions

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, *_):
        if ctx.gradients is None:
            raise RuntimeError("the gradients were scaled in place by an earlier backward: call head_loss again")
        grad_states, grad_weight = ctx.gradients
        ctx.gradients = None
        return grad_states.mul_(grad_loss), grad_weight.mul_(grad_loss).to(ctx.weight_dtype), *[None] * 7


class _RowForm(Protocol):
    """The passes over logits: `drafthead.losses.rows`, or `drafthead.losses.kernels` with the same functions."""

    def prepare_target(self, objective: ObjectiveName, logits: Tensor, lse: Tensor) -> Target: ...

    def score_rows(
        self,
        objective: ObjectiveName,
        logits: Tensor,
        target: Target,
        met: Tensor,
        scale: Tensor,
        grad: Tensor | None,
    ) -> rows.RowLoss: ...


def _row_form(states: Tensor) -> _RowForm:
    if not states.is_cuda or states.dtype == torch.float64 or find_spec("triton") is None:
        return rows
    from drafthead.losses import kernels  # not at the top: imports Triton

    return kernels


def _buffer(parts: list[Tensor], weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for the logits of the longest part: allocated once, since fresh pages cost more than a pass over them."""
    return weight.new_empty(max(map(len, parts), default=0), len(weight), dtype=dtype)


def _product(a: Tensor, b: Tensor, buffer: Tensor) -> Tensor:
    """a @ b in the first rows of the buffer and in its type."""
    out = buffer[: len(a)]
    if a.dtype == out.dtype:
        return torch.mm(a, b, out=out)
    if a.is_cuda:  # not rounded to half precision on the way
        return torch.mm(a, b, out_dtype=out.dtype, out=out)
    return out.copy_(a @ b)


def _add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)  # not addmm_, which torch's counter of operations does not know
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += a @ b
