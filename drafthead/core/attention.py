"""Attention of the unrolled training steps, without a mask and in memory linear in T.

The query of index t at TTT step k sees the step-0 keys at indices <= t of its own document, and its own
index in each of the steps 1..k. The first part is causal flash attention, which also returns the
log-sum-exp of its scores; the second is k scalars per query. With L0, O0 from flash attention and
s_j = q . k_j / sqrt(D):

    L = logaddexp(L0, s_1, ..., s_k)        O = exp(L0 - L) O0 + sum_j exp(s_j - L) v_j

The backward is exact: flash attention's own backward recomputes its probabilities as exp(s - lse) and
takes the row term from dO . O, so handing it the merged O and L yields the gradients of the merged
softmax with respect to the block; the k diagonal terms are differentiated by hand. A dense mask, the
usual way, costs T x (k + 1) T scores per step.

Shapes: T tokens, Q query heads, G key/value heads (Q a multiple of G), D head dimension, S documents.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor


def ttt_attention(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], cu_seqlens: Tensor) -> Tensor:
    """Attend from TTT step k, where k = len(keys) - 1.

    Args:
        query: (T, Q, D), rotated, of step k.
        keys: k + 1 tensors (T, G, D), rotated, of steps 0..k.
        values: k + 1 tensors (T, G, D).
        cu_seqlens: (S + 1,) int32 document boundaries.

    Returns:
        (T, Q, D).
    """
    pairs = [tensor for pair in zip(keys[1:], values[1:], strict=True) for tensor in pair]
    return _TTTAttention.apply(query, keys[0], values[0], cu_seqlens, *pairs)


class _TTTAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, cu_seqlens, *pairs):
        scale = query.shape[-1] ** -0.5
        block_out, block_lse, saved_rng = _block_forward(query, key, value, cu_seqlens, scale)
        diagonal = [_grouped_dot(query, k_j) * scale for k_j in pairs[0::2]]  # each (T, Q)
        lse = torch.logsumexp(torch.stack([block_lse, *diagonal]), dim=0)  # (T, Q)
        out = (block_lse - lse).exp()[..., None] * block_out
        for score, v_j in zip(diagonal, pairs[1::2], strict=True):
            out = out + (score - lse).exp()[..., None] * _expand(v_j, query.shape[1])
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, cu_seqlens, out, lse, *saved_rng, *pairs)
        ctx.num_rng = len(saved_rng)
        return out

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, cu_seqlens, out, lse, *rest = ctx.saved_tensors
        rng, pairs = rest[: ctx.num_rng], rest[ctx.num_rng :]
        groups, scale = key.shape[1], query.shape[-1] ** -0.5
        grad_query, grad_key, grad_value = _block_backward(
            grad_out.contiguous(), query, key, value, out, lse, cu_seqlens, scale, rng
        )
        row = (grad_out * out).sum(-1)  # (T, Q), the softmax backward's row term
        grad_pairs = []
        for k_j, v_j in zip(pairs[0::2], pairs[1::2], strict=True):
            probability = (_grouped_dot(query, k_j) * scale - lse).exp()
            grad_score = (probability * (_grouped_dot(grad_out, v_j) - row) * scale)[..., None]
            grad_query = grad_query + grad_score * _expand(k_j, query.shape[1])
            grad_pairs.append(_reduce(grad_score * query, groups).to(k_j.dtype))
            grad_pairs.append(_reduce(probability[..., None] * grad_out, groups).to(v_j.dtype))
        return grad_query.to(query.dtype), grad_key, grad_value, None, *grad_pairs


def _expand(states: Tensor, num_heads: int) -> Tensor:
    """(T, G, D) to (T, Q, D): every query head of a group sees the group's key or value."""
    return states.repeat_interleave(num_heads // states.shape[1], dim=1)


def _reduce(states: Tensor, num_groups: int) -> Tensor:
    """(T, Q, D) to (T, G, D): the transpose of `_expand`."""
    return states.unflatten(1, (num_groups, -1)).sum(2)


def _grouped_dot(query: Tensor, states: Tensor) -> Tensor:
    """Row-wise dot products of (T, Q, D) with (T, G, D), as (T, Q) in at least float32."""
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.unflatten(1, (states.shape[1], -1))  # (T, G, Q/G, D)
    return torch.einsum("tgqd,tgd->tgq", grouped.to(wide), states.to(wide)).flatten(1)


def _block_forward(query, key, value, cu_seqlens, scale):
    """Causal attention within each document: output (T, Q, D), log-sum-exp (T, Q), backward's extras."""
    if query.is_cuda:
        longest = int(cu_seqlens.diff().max())
        out, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
            query, key, value, cu_seqlens, cu_seqlens, longest, longest, 0.0, True, False, scale=scale
        )
        return out, lse.T, (rng, unused)
    outs, lses = [], []
    for start, end in _documents(cu_seqlens):
        q, k, v = _cpu_views(query, key, value, start, end)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0].T)
    return torch.cat(outs), torch.cat(lses), ()


def _block_backward(grad_out, query, key, value, out, lse, cu_seqlens, scale, rng):
    """Gradients of the block part, given the merged output and log-sum-exp."""
    if query.is_cuda:
        longest = int(cu_seqlens.diff().max())
        return torch.ops.aten._flash_attention_backward(
            grad_out, query, key, value, out, lse.T.contiguous(), cu_seqlens, cu_seqlens, longest, longest,
            0.0, True, *rng, scale=scale,
        )  # fmt: skip
    grads: tuple[list, list, list] = ([], [], [])
    for start, end in _documents(cu_seqlens):
        q, k, v = _cpu_views(query, key, value, start, end)
        piece = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _heads_first(grad_out, start, end), q, k, v, _heads_first(out, start, end),
            lse[start:end].T[None].contiguous(), 0.0, True, scale=scale,
        )  # fmt: skip
        for collected, grad in zip(grads, piece, strict=True):
            collected.append(grad[0].transpose(0, 1))
    grad_query, grad_key, grad_value = (torch.cat(pieces) for pieces in grads)
    groups = key.shape[1]
    return grad_query, _reduce(grad_key, groups), _reduce(grad_value, groups)


def _documents(cu_seqlens: Tensor) -> list[tuple[int, int]]:
    return list(pairwise(cu_seqlens.tolist()))


def _heads_first(states: Tensor, start: int, end: int) -> Tensor:
    """(T, Q, D) to (1, Q, end - start, D), the layout of the CPU kernel."""
    return states[start:end].transpose(0, 1)[None]


def _cpu_views(query, key, value, start, end):
    """The CPU kernel has no grouped heads: keys and values are repeated per query head."""
    heads = query.shape[1]
    return (
        _heads_first(query, start, end),
        _heads_first(_expand(key[start:end], heads), 0, end - start),
        _heads_first(_expand(value[start:end], heads), 0, end - start),
    )
