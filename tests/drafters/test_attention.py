"""Closed-form TTT attention against the dense softmax it stands for."""

import pytest
import torch

from drafthead.drafters import attention
from drafthead.drafters.attention import draft_attention
from drafthead.drafters.batch import tail_layout
from tests.rounding import rounded, rounding

LONGEST = 4 * 300  # terms of a key's gradient below: four heads read it, at 300 places
# Of bf16: probabilities, output, their gradients and the result are rounded, four times by half of eps.
HALF = rounded(torch.bfloat16, LONGEST, times=2)


def dense_attention_reference(query, keys, values, cu_queries, cu_keys, window=None, sinks=None):
    """The definition: every allowed score written out, one softmax, no tricks."""
    num_rows, _, dim = query.shape
    document = torch.repeat_interleave(torch.arange(len(cu_keys) - 1), cu_keys.diff().long())
    index = torch.arange(len(document))
    token = torch.cat(
        [index[end - rows : end] for end, rows in zip(cu_keys[1:].tolist(), cu_queries.diff().tolist(), strict=True)]
    )
    causal = (token[:, None] >= index[None]) & (document[token][:, None] == document[None])
    if window is not None:
        causal &= token[:, None] - index[None] < window
    allowed = torch.cat([causal] + [torch.eye(num_rows, dtype=torch.bool)] * (len(keys) - 1), dim=1)
    group = query.shape[1] // keys[0].shape[1]
    all_keys = torch.cat(list(keys)).repeat_interleave(group, dim=1)
    all_values = torch.cat(list(values)).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, all_keys) * dim**-0.5
    scores = scores.masked_fill(~allowed, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, num_rows, 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., : len(all_keys)], all_values)


def random_problem(num_steps, heads, rows, lengths, dim=8, held=torch.float64, dtype=torch.float64, device="cpu"):
    """Query, keys, values, cu_queries, cu_keys and weights of the output in a scalar loss: numbers that `held` has."""
    generator = torch.Generator().manual_seed(num_steps * 10 + heads[1])
    cu_keys, cu_queries = (torch.tensor([0, *counts]).cumsum(0).int() for counts in (lengths, rows))

    def random(length, count):
        states = torch.randn(length, count, dim, generator=generator, dtype=torch.float64)
        return states.to(held).to(device, dtype).requires_grad_()

    query = random(sum(rows), heads[0])
    keys, values = (
        [random(sum(lengths), heads[1])] + [random(sum(rows), heads[1]) for _ in range(num_steps - 1)] for _ in range(2)
    )
    weights = torch.randn(query.shape, generator=generator, dtype=torch.float64).to(held).to(device, dtype)
    return query, keys, values, cu_queries.to(device), cu_keys.to(device), weights


def attended(query, keys, values, cu_queries, cu_keys, window=None, sinks=None):
    longest = int(cu_queries.diff().max()), int(cu_keys.diff().max())
    return draft_attention(query, keys, values, (cu_queries, cu_keys, longest, None), window, sinks)


def outputs_and_gradients(attend, query, keys, values, cu_queries, cu_keys, weights, window=None):
    out = attend(query, keys, values, cu_queries, cu_keys, window)
    return out, torch.autograd.grad((out * weights).sum(), [query, *keys, *values])


@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("rows", [[9, 1, 14, 3], [4, 1, 14, 1], [1, 0, 5, 3]], ids=["all", "tails", "short tails"])
@pytest.mark.parametrize("window", [None, 1, 5, 14])
@pytest.mark.parametrize("kernels", ["flash", "dense"])
def test_forward_and_gradients_equal_dense(monkeypatch, num_steps, heads, rows, window, kernels):
    if kernels == "dense":  # what CUDA runs in float32
        monkeypatch.setattr(
            attention, "_document_kernels", lambda _: (attention.dense_forward, attention.dense_backward)
        )
    problem = random_problem(num_steps, heads, rows, [9, 1, 14, 3])
    ours, our_grads = outputs_and_gradients(attended, *problem, window)
    dense, dense_grads = outputs_and_gradients(dense_attention_reference, *problem, window)
    torch.testing.assert_close(ours, dense, rtol=0, atol=1e-12)
    for our_grad, dense_grad in zip(our_grads, dense_grads, strict=True):
        torch.testing.assert_close(our_grad, dense_grad, rtol=0, atol=1e-11)


@pytest.mark.parametrize("num_steps", [1, 3])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(
    ("device", "dtype", "tolerance"),
    [
        ("cpu", torch.float64, 1e-12),
        ("cpu", torch.bfloat16, HALF),
        pytest.param("cuda", torch.bfloat16, HALF, marks=pytest.mark.requires_gpu),
    ],
)
def test_sinks_take_their_share_and_learn_it(num_steps, window, device, dtype, tolerance):
    outputs = []
    for attend, *where in ((attended, dtype, device), (dense_attention_reference, torch.float64, "cpu")):
        *problem, weights = random_problem(num_steps, (4, 2), [4, 1, 14, 1], [9, 1, 14, 3], 16, dtype, *where)
        sinks = torch.tensor([-2.0, 0.0, 1.5, 4.0], dtype=where[0], device=where[1], requires_grad=True)
        out = attend(*problem, window, sinks)
        outputs.append(
            [out, *torch.autograd.grad((out * weights).sum(), [problem[0], *problem[1], *problem[2], sinks])]
        )
    for one, reference in zip(*outputs, strict=True):
        assert one.dtype == dtype
        assert reference.norm() > 0.1
        assert (one.double().cpu() - reference).norm() <= tolerance * reference.norm()


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.requires_gpu)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("window", [None, 48])
@pytest.mark.parametrize("heads", [(8, 8), (8, 2)])
@pytest.mark.parametrize(
    "rows",
    [[300, 1, 129, 64], [40, 1, 128, 5], [7, 0, 60, 0], [1, 0, 1, 1]],
    ids=["all", "tails", "documents without rows", "at most one row"],
)
def test_training_types_follow_float32(device, dtype, num_steps, window, heads, rows):
    problem = num_steps, heads, rows, [300, 1, 129, 64], 64, dtype
    ours, our_grads = outputs_and_gradients(attended, *random_problem(*problem, dtype, device), window)
    # The reference computes from the same rounded numbers.
    dense, dense_grads = outputs_and_gradients(dense_attention_reference, *random_problem(*problem), window)
    tolerance = HALF if dtype == torch.bfloat16 else rounding(dtype, LONGEST)
    for one, reference in zip([ours, *our_grads], [dense, *dense_grads], strict=True):
        assert one.dtype == dtype
        assert one.isfinite().all()
        assert (one.double().cpu() - reference).norm() <= tolerance * reference.norm() + 1e-6


def test_a_layout_knows_the_longest_document_without_asking_a_gpu():
    layout = tail_layout([5, 3, 9], [4, 0, 7])
    assert (layout.longest, layout.most_rows) == (9, 3)
    assert layout.cu_seqlens.diff().max() == layout.longest
    assert layout.cu_rows.diff().max() == layout.most_rows
