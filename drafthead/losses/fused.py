"""Language-model head and loss in one pass over chunks of rows: no batch-sized logits ever exist.

Only scored rows are computed, ordered by the teacher token that each meets, so that all draft positions share
one chunk of the teacher's probabilities and each matrix product takes the rows of all positions at once. The
gradient with respect to hidden states and head weight is formed in the forward, while a chunk's logits are at
hand, and scaled in the backward. It costs one extra buffer of the head's size; autograd over plain logits would
keep M x D of them. Giving that up would mean recomputing the logits in the backward, a third more work.

The objective is any of `drafthead.losses.objectives`, or a mixture; softmax in float32 (float64 for float64
inputs). The passes over logits are Triton kernels for objectives that have one, on CUDA; else PyTorch, block by block.

Shapes: M rows of the drafter, K draft positions, T teacher tokens, H hidden, D draft vocabulary, C teacher tokens
and R rows of a chunk.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from drafthead.losses import objectives
from drafthead.losses.objectives import Objective

CHUNK_ROWS = {"cpu": 1024, "cuda": 4096}  # rows of logits that exist at a time


class Chunks(NamedTuple):
    """Scored rows, by the teacher token that each meets, and where they are cut; each token lies in one chunk.

    Attributes:
        tokens: (C,) teacher tokens, ascending.
        rows: (R,) rows, as indices into M, token by token.
        met: (R,) index, within its chunk, of the token that each row meets.
        token_counts, row_counts: tokens and rows of each chunk, known on the host.
    """

    tokens: Tensor
    rows: Tensor
    met: Tensor
    token_counts: list[int]
    row_counts: list[int]

    def split(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Tokens, rows and met of one chunk after another."""
        by_row = self.rows.split(self.row_counts), self.met.split(self.row_counts)
        return list(zip(self.tokens.split(self.token_counts), *by_row, strict=True))


@dataclass(frozen=True)
class HeadRows:
    """What a drafter hands to the head: M rows, all of draft position 0 first, then those of position 1, and so on.

    Attributes:
        states: (M, H) normed hidden states of the draft.
        teacher: (M,) int64, the teacher token that each row meets; -1: not scored. At one draft position at most
            one row meets a token, or chunks grow beyond `CHUNK_ROWS`.
        counts: rows of each of the K draft positions; they sum to M.
        chunks: `chunk_rows` of the same teacher; made here where there are none, which on a GPU keeps the host waiting.
        own_loss: (M,) a further loss of each scored row, float32 or wider, to be scaled like it; None: there is none.
    """

    states: Tensor
    teacher: Tensor
    counts: tuple[int, ...]
    chunks: Chunks | None = None
    own_loss: Tensor | None = None


class HeadLoss(NamedTuple):
    """What the fused head returns. A tuple, because ZeRO-3's hooks look for tensors in nothing else.

    Attributes:
        loss: scalar, sum over scored rows of scale[k] * l; carries the gradient.
        position_sums: (K,) unscaled sums of l, without gradient.
        predictions: (M,) the draft's most likely index in the draft vocabulary; -1 where not scored.
    """

    loss: Tensor
    position_sums: Tensor
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
    rows: HeadRows, weight: Tensor, teacher: Teacher, scale: Tensor, objective: Objective = "forward_kl"
) -> HeadLoss:
    """Draft head, softmax and loss of all draft positions.

    Args:
        rows: states of the draft and the teacher tokens that they meet.
        weight: (D, H) the draft's lm_head.
        teacher: the target's states and head rows.
        scale: (K,) weight of one row's loss at each draft position.
        objective: what l is: a name in `objectives.OBJECTIVES`, or names with the coefficients of their sum.
    """
    needs_grad = torch.is_grad_enabled() and (rows.states.requires_grad or weight.requires_grad)
    return HeadLoss(*_FusedHeadLoss.apply(rows.states, weight, rows, teacher, scale, objective, needs_grad))


@torch.no_grad()
def first_drafts(rows: HeadRows, weight: Tensor) -> Tensor:
    """(M,) `predictions` of `head_loss`, without a loss; `weight` (D, H)."""
    predictions = torch.full((len(rows.states),), -1, device=rows.states.device)
    chunks = (rows.chunks or chunk_rows(rows.teacher, len(rows.counts), rows.states.device.type)).split()
    buffer = _buffer([chosen for _, chosen, _ in chunks], weight, torch.promote_types(rows.states.dtype, torch.float32))
    for _, chosen, _ in chunks:
        predictions[chosen] = objectives.argmax(_product(rows.states[chosen], weight.T, buffer))
    return predictions


class _FusedHeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, states, weight, rows, teacher, scale, objective, needs_grad):
        wide = torch.promote_types(states.dtype, torch.float32)
        passes = _passes(objective, states)
        losses = states.new_zeros(len(states), dtype=wide)
        predictions = torch.full((len(states),), -1, device=states.device)
        row_scale = torch.cat([one.expand(n) for one, n in zip(scale.to(wide), rows.counts, strict=True)])
        grad_states = torch.zeros_like(states if needs_grad else states[:0])
        grad_weight = torch.zeros_like(weight if needs_grad else weight[:0], dtype=wide)

        chunks = (rows.chunks or chunk_rows(rows.teacher, len(rows.counts), states.device.type)).split()
        teacher_buffer = _buffer([tokens for tokens, _, _ in chunks], teacher.weight, wide)
        # A CPU rounds products of half precision; `score_rows` widens them while they are in its cache.
        logits_type = wide if states.is_cuda else weight.dtype
        logits_buffer = _buffer([chosen for _, chosen, _ in chunks], weight, logits_type)
        # The gradient overwrites the logits, unless the products want it in another type.
        same = logits_buffer.dtype == weight.dtype
        grad_buffer = logits_buffer if same else torch.empty_like(logits_buffer, dtype=weight.dtype)
        added = torch.empty_like(weight if needs_grad and not states.is_cuda else weight[:0])  # pages if it is written
        for tokens, chosen, met in chunks:
            teacher_logits = _product(teacher.hidden[tokens], teacher.weight.T, teacher_buffer)
            target = passes.prepare_target(objective, teacher_logits, teacher.lse[tokens].to(wide))
            inputs = states[chosen]
            logits = _product(inputs, weight.T, logits_buffer)
            grad_logits = grad_buffer[: len(inputs)] if needs_grad else None
            losses[chosen], predictions[chosen] = passes.score_rows(
                objective, logits, target, met, row_scale[chosen], grad_logits
            )
            if grad_logits is not None:
                grad_states[chosen] = grad_logits @ weight
                _add_product(grad_weight, grad_logits.T, inputs, added)

        if needs_grad:
            ctx.gradients = grad_states, grad_weight
            ctx.weight_dtype = weight.dtype
        position_sums = _sums(losses, rows.counts)
        ctx.mark_non_differentiable(position_sums, predictions)
        return (position_sums * scale).sum(), position_sums, predictions

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_loss, *_):
        if ctx.gradients is None:
            raise RuntimeError("the gradients were scaled in place by an earlier backward: call head_loss again")
        grad_states, grad_weight = ctx.gradients
        ctx.gradients = None
        return grad_states.mul_(grad_loss), grad_weight.mul_(grad_loss).to(ctx.weight_dtype), *[None] * 5


def chunk_rows(teacher: Tensor, num_positions: int, device_type: str) -> Chunks:
    """Order and cut the scored rows.

    As long as at one draft position at most one row meets a token, a chunk has at most max(CHUNK_ROWS, K) rows.

    Args:
        teacher: (M,) the teacher token that each row meets; -1: not scored.
        num_positions: K, number of draft positions.
        device_type: type of the device that the rows are computed on.
    """
    scored = (teacher >= 0).nonzero()[:, 0]
    token, order = teacher[scored].sort(stable=True)
    tokens, met, counts = token.unique_consecutive(return_inverse=True, return_counts=True)
    width = max(CHUNK_ROWS[device_type] // num_positions, 1)  # teacher tokens of a chunk
    parts = counts.split(width) if len(counts) else ()
    row_counts = [int(part.sum()) for part in parts]
    return Chunks(tokens, scored[order], met % width, [len(part) for part in parts], row_counts)


def _sums(losses: Tensor, counts: tuple[int, ...]) -> Tensor:
    """(K,) sum over the rows of each draft position."""
    if len(set(counts)) == 1:
        return losses.view(len(counts), counts[0]).sum(1)
    return torch.stack([part.sum() for part in losses.split(counts)])


def _passes(objective: Objective, states: Tensor) -> ModuleType:
    """Where `prepare_target` and `score_rows` are taken from: Triton, or PyTorch for whatever it does not know."""
    if (
        states.is_cuda
        and states.dtype != torch.float64
        and objective == objectives.ANALYTIC_OBJECTIVE
        and find_spec("triton")
    ):
        from drafthead.losses import kernels  # not at the top: imports Triton

        return kernels
    return objectives


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


def _add_product(total: Tensor, a: Tensor, b: Tensor, buffer: Tensor) -> None:
    """total += a @ b; the buffer is for a product in another type."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)  # not addmm_, which torch's counter of operations does not know
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total += torch.mm(a, b, out=buffer)
