"""Attention of draft positions, without a mask and in memory linear in T.

A query of row r sees the keys of the text at indices <= that of r in its own document, and row r's own entries of some
draft positions: the earlier steps of an unrolled draft, or a whole block. The first part is causal flash attention,
which also returns the log-sum-exp of its scores; the second is one scalar per query and position. With L0, O0 from
flash attention and s_j = q . k_j / sqrt(D) for the k entries of its row:

    L = logaddexp(L0, s_1, ..., s_k)        O = exp(L0 - L) O0 + sum_j exp(s_j - L) v_j

The backward is exact: flash attention's own backward recomputes its probabilities as exp(s - lse) and takes the row
term from dO . O, so handing it the merged O and L yields the gradients of the merged softmax with respect to the
block; the k diagonal terms are differentiated by hand. A dense mask, the usual way, costs T x (k + 1) T scores per
step.

Only rows that lead to a loss need a query: nothing but the row itself ever reads its draft positions. So the queries
are the last rows of each document, from where its loss begins, or some of them, while keys of the text cover all of it.
CUDA's flash kernel, for half precision, takes all documents at once. Elsewhere each document's block is itself merged
from two calls: all keys before the first query, and the causal square from there on; by torch's flash attention on CPU,
by `dense_forward` for float32 on CUDA. Some rows of a document, or those with a sliding window of W keys, are taken a
block at a time under a mask, so that memory is linear in the length of a document, and with a window time too.

Shapes: T tokens, R rows, P of them with a query, Q query heads, G key/value heads (Q a multiple of G), D head
dimension, S documents, W keys of a window.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from drafthead.drafters.recompute import kernels_for

_BLOCK_ROWS = 256  # under one mask


# Of a batch's documents: cu_queries and cu_keys (S + 1,) int32, where each begins among the rows and among the tokens;
# most rows and most tokens of one, which to look up here would wait for a GPU; and the rows (P,) that queries are of,
# ascending, with R, or None for all rows.
Documents = tuple[Tensor, Tensor, tuple[int, int], tuple[Tensor, int] | None]


def draft_attention(
    query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], documents: Documents, window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Attend from one draft position.

    Args:
        query: (R, Q, D) rotated queries of the last rows of each document, or of P of these.
        keys: rotated keys of the text (T, G, D), then of each draft position that is seen, as many rows as queries.
        values: values, in the same order and shapes as the keys.
        documents: documents of the batch.
        window: keys of the text that a row sees, its own and those before it, at least 1; None: all.
        sinks: (Q,) score of one more key for each query head, whose value is zero.

    Returns:
        (R, Q, D), or (P, Q, D).
    """
    pairs = [tensor for pair in zip(keys[1:], values[1:], strict=True) for tensor in pair]
    window = None if window is None or window >= documents[2][1] else window
    return _DraftAttention.apply(query, keys[0], values[0], sinks, (*documents, window), *pairs)


class _DraftAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, query, key, value, sinks, text, *pairs):
        scale, attend = query.shape[-1] ** -0.5, _flash_forward if kernels_for(query) else _pieces_forward
        block_out, block_lse, ctx.rng = attend(query, key, value, scale, *text)
        if sinks is not None:
            block_out, block_lse = _with_sinks(block_out, block_lse, sinks)
        out, lse = _merge_pairs(query, pairs, block_out, block_lse, scale)
        ctx.save_for_backward(query, key, value, sinks, out, lse, *pairs)
        ctx.text = text
        return out

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, sinks, out, lse, *pairs = ctx.saved_tensors
        groups, scale, kernels = key.shape[1], query.shape[-1] ** -0.5, kernels_for(query)
        differentiate = _flash_backward if kernels else _pieces_backward
        grad_query, grad_key, grad_value = differentiate(
            grad_out.contiguous(), query, key, value, out, lse, ctx.rng, scale, *ctx.text
        )
        grad_sinks = None
        if sinks is not None:
            grad_sinks = -(_grouped_dot(grad_out, out) * (sinks - lse).exp()).sum(0).to(sinks.dtype)
        if pairs and kernels:
            grads = kernels.merge_backward(grad_out.contiguous(), query, pairs, out, lse.T, grad_query, scale)
            return grad_query, grad_key, grad_value, grad_sinks, None, *grads
        row = _grouped_dot(grad_out, out)  # (R, Q), the softmax backward's row term
        grad_query, grad_pairs = grad_query.to(lse.dtype), []
        for k_j, v_j in zip(pairs[0::2], pairs[1::2], strict=True):
            probability = (_grouped_dot(query, k_j) * scale - lse).exp()
            grad_score = probability * (_grouped_dot(grad_out, v_j) - row) * scale
            _add_scaled(grad_query, grad_score, k_j)
            grad_pairs.append(_reduce(grad_score[..., None] * query, groups).to(k_j.dtype))
            grad_pairs.append(_reduce(probability[..., None] * grad_out, groups).to(v_j.dtype))
        return grad_query.to(query.dtype), grad_key, grad_value, grad_sinks, None, *grad_pairs


def _with_sinks(block_out: Tensor, block_lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """The softmax over the text, (R, Q, D) and (R, Q), with one more entry of value zero."""
    lse = torch.logaddexp(block_lse.T, sinks.to(block_lse)[:, None]).T
    out = torch.empty_like(block_out)  # row by row, and lse head by head: as kernels read them
    return torch.mul(block_out, (block_lse - lse).exp()[..., None], out=out), lse


def _merge_pairs(
    query: Tensor, pairs: Sequence[Tensor], block_out: Tensor, block_lse: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Output (R, Q, D) and log-sum-exp (R, Q) over the text and each pair's entry."""
    if kernels := kernels_for(query):
        out, lse = kernels.merge(query, pairs, block_out, block_lse.T, scale) if pairs else (block_out, block_lse.T)
        return out, lse.T
    diagonal = [_grouped_dot(query, k_j) * scale for k_j in pairs[0::2]]  # each (R, Q)
    lse = torch.logsumexp(torch.stack([block_lse, *diagonal]), dim=0)  # (R, Q)
    out = (block_lse - lse).exp()[..., None] * block_out
    for score, v_j in zip(diagonal, pairs[1::2], strict=True):
        _add_scaled(out, (score - lse).exp(), v_j)
    return out.to(query.dtype), lse


def _reduce(states: Tensor, num_groups: int) -> Tensor:
    """(R, Q, D) to (R, G, D): gradients of a group's key or value, which all of its query heads see."""
    return states if states.shape[1] == num_groups else states.unflatten(1, (num_groups, -1)).sum(2)


def _add_scaled(total: Tensor, factor: Tensor, states: Tensor) -> None:
    """total (R, Q, D) += factor (R, Q) times the states (R, G, D) of each query head's group, in one pass."""
    grouped = (states.shape[1], -1)
    total.unflatten(1, grouped).addcmul_(factor.unflatten(1, grouped)[..., None], states[:, :, None])


def _grouped_dot(query: Tensor, states: Tensor) -> Tensor:
    """Row-wise dot products of (R, Q, D) with (R, G, D), as (R, Q) in at least float32."""
    wide = torch.promote_types(query.dtype, torch.float32)
    grouped = query.unflatten(1, (states.shape[1], -1))  # (R, G, Q/G, D)
    return torch.einsum("rgqd,rgd->rgq", grouped.to(wide), states.to(wide)).flatten(1)


def _flash_forward(query, key, value, scale, cu_queries, cu_keys, longest, within, window):
    """CUDA's flash kernel, half precision: output (R, Q, D), log-sum-exp (R, Q), and what its backward reads."""
    # With fewer queries than keys the kernel aligns them at the document's end. lse is (Q, R) float32.
    out, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
        _among_rows(query, within), key, value, cu_queries, cu_keys, *_most(longest), 0.0, True, False, scale=scale,
        **_left(window),
    )  # fmt: skip
    if within is not None:
        out, lse = out[within[0]], lse[:, within[0]]
    return out, lse.T, (rng, unused)


def _flash_backward(
    grad_out, query, key, value, out, lse, rng, scale, cu_queries, cu_keys, longest, within, window
):  # fmt: skip
    """Gradients of the text's part, given the merged output and log-sum-exp."""
    grad_out, query, out, lse = (_among_rows(part, within) for part in (grad_out, query, out, lse))
    grad_query, grad_key, grad_value = torch.ops.aten._flash_attention_backward(
        grad_out, query, key, value, out, lse.T.contiguous(), cu_queries, cu_keys, *_most(longest), 0.0, True, *rng,
        scale=scale, **_left(window),
    )  # fmt: skip
    return grad_query if within is None else grad_query[within[0]], grad_key, grad_value


def _among_rows(part: Tensor, within: tuple[Tensor, int] | None) -> Tensor:
    """(R, ...) of (P, ...): a row between them has a query of zeros, and a gradient of zeros. The causal edge of CUDA's
    kernel needs every row of a document's tail; its share of a step is small."""
    if within is None:
        return part
    return part.new_zeros(within[1], *part.shape[1:]).index_copy_(0, within[0], part)


def _most(longest: tuple[int, int]) -> tuple[int, int]:
    """Upper bounds; that of queries is never 1: there torch takes a decoding path that wants one of every document."""
    return max(longest[0], 2), longest[1]


def _left(window: int | None) -> dict[str, int]:
    """The window, as CUDA's flash kernels count it."""
    return {} if window is None else {"window_size_left": window - 1, "window_size_right": 0}


def _pieces_forward(query, key, value, scale, cu_queries, cu_keys, longest, within, window):
    """As `_flash_forward`, document by document."""
    attend, _ = _document_kernels(query)
    heads, wide = query.shape[1], torch.promote_types(query.dtype, torch.float32)
    outs, lses = [query[:0]], [query.new_empty(0, heads, dtype=wide)]
    for rows, pieces in _pieces(cu_queries, cu_keys, window, within, query):
        q, parts = _heads_first(query[rows], heads), []
        for piece, causal, mask in pieces:
            k, v = _heads_first(key[piece], heads), _heads_first(value[piece], heads)
            parts.append(attend(q, k, v, 0.0, causal, attn_mask=mask, scale=scale))
        out, lse = parts[0] if len(parts) == 1 else _merge(*parts)
        outs.append(out[0].transpose(0, 1))
        lses.append(lse[0].T)
    return torch.cat(outs), torch.cat(lses), ()


def _pieces_backward(
    grad_out, query, key, value, out, lse, rng, scale, cu_queries, cu_keys, longest, within, window
):  # fmt: skip
    """As `_flash_backward`."""
    _, differentiate = _document_kernels(query)
    grad_query, grad_key, grad_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
    heads, groups = query.shape[1], key.shape[1]
    for rows, pieces in _pieces(cu_queries, cu_keys, window, within, query):
        q, wide_out, wide_grad = (_heads_first(states[rows], heads) for states in (query, out, grad_out))
        row_lse = lse[rows].T[None].contiguous()
        total = torch.zeros_like(q)
        for piece, causal, mask in pieces:
            k, v = _heads_first(key[piece], heads), _heads_first(value[piece], heads)
            dq, dk, dv = differentiate(wide_grad, q, k, v, wide_out, row_lse, 0.0, causal, attn_mask=mask, scale=scale)
            total = total + dq
            grad_key[piece] += _reduce(dk[0].transpose(0, 1), groups)
            grad_value[piece] += _reduce(dv[0].transpose(0, 1), groups)
        grad_query[rows] = total[0].transpose(0, 1)
    return grad_query, grad_key, grad_value


def _document_kernels(query: Tensor) -> tuple[Callable, Callable]:
    """Forward and backward of one document."""
    if query.is_cuda:
        return dense_forward, dense_backward
    aten = torch.ops.aten
    return aten._scaled_dot_product_flash_attention_for_cpu, aten._scaled_dot_product_flash_attention_for_cpu_backward


def _pieces(
    cu_queries: Tensor, cu_keys: Tensor, window: int | None, within: tuple[Tensor, int] | None, query: Tensor
) -> Iterator[tuple[slice, list[tuple[slice, bool, Tensor | None]]]]:
    """Queries of one document, and the pieces they attend to: keys, whether causally, and what is added to scores
    (n, m), of the query's type."""
    of_query = torch.arange(len(query), device=query.device) if within is None else within[0]  # the row of each
    begins = torch.searchsorted(of_query, cu_queries.to(of_query)).tolist()
    documents = zip(pairwise(begins), pairwise(cu_queries.tolist()), pairwise(cu_keys.tolist()), strict=True)
    for (low, high), (row, row_end), (start, end) in documents:
        if low == high:
            continue
        first = end - (row_end - row)  # the token of the first row
        if within is None and (window is None or window >= end - start):
            before = [(slice(start, first), False, None)] if first > start else []
            yield slice(low, high), [(slice(first, end), True, None), *before]
            continue
        for queries in of_query[low:high].split(min(window or _BLOCK_ROWS, _BLOCK_ROWS)):
            token = queries - row + first
            seen, stop = start if window is None else max(int(token[0]) - window + 1, start), int(token[-1]) + 1
            back = token[:, None] - torch.arange(seen, stop, device=query.device)  # (n, m), how far
            unseen = back < 0 if window is None else (back < 0) | (back >= window)
            mask = torch.zeros_like(unseen, dtype=query.dtype).masked_fill(unseen, float("-inf"))
            yield slice(low, low + len(token)), [(slice(seen, stop), False, mask)]
            low += len(token)


def _merge(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Two softmaxes over disjoint keys as the one over both: outputs (1, Q, R, D), log-sum-exps (1, Q, R)."""
    lse = torch.logaddexp(one[1], other[1])
    return (one[1] - lse).exp()[..., None] * one[0] + (other[1] - lse).exp()[..., None] * other[0], lse


def _heads_first(states: Tensor, heads: int) -> Tensor:
    """(R, Q, D) or (R, G, D) to (1, Q, R, D), as the kernels of one document want it. They have no grouped heads: keys
    and values are repeated for each query head of their group."""
    repeated = states[:, :, None].expand(-1, -1, heads // states.shape[1], -1).flatten(1, 2)  # a view of equal heads
    return repeated.transpose(0, 1)[None]


def dense_forward(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, attn_mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention with every score written out, for CUDA in float32 and float64, which its flash kernels do not take.

    Memory is quadratic in the length of a document: for small runs and for tests at full precision; train large heads
    with train.precision bf16. Arguments and results are those of torch's flash attention for the CPU: output
    (1, Q, R, D) and log-sum-exp (1, Q, R) of query (1, Q, R, D), key and value (1, Q, T, D); R = T where causal.
    """
    scores = _scores(query, key, causal, attn_mask, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ value, lse


def dense_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout: float,
    causal: bool,
    attn_mask: Tensor | None,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; `out` and `lse` may be those of a softmax that has further keys."""
    probability = (_scores(query, key, causal, attn_mask, scale) - lse[..., None]).exp()
    row = (grad * out).sum(-1, keepdim=True)
    grad_scores = probability * (grad @ value.mT - row) * scale
    return grad_scores @ key, grad_scores.mT @ query, probability.mT @ grad


def _scores(query: Tensor, key: Tensor, causal: bool, attn_mask: Tensor | None, scale: float) -> Tensor:
    scores = query @ key.mT * scale  # (1, Q, R, T)
    if attn_mask is not None:
        scores += attn_mask
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(future, float("-inf"))
    return scores
