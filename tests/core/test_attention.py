"""Closed-form TTT attention against the dense softmax it stands for."""

import pytest
import torch

from drafthead.core.attention import ttt_attention


def dense_attention(query, keys, values, cu_queries, cu_keys):
    """The definition: every allowed score written out, one softmax, no tricks."""
    num_rows, _, dim = query.shape
    document = torch.repeat_interleave(torch.arange(len(cu_keys) - 1), cu_keys.diff().long())
    index = torch.arange(len(document))
    token = torch.cat(
        [index[end - rows : end] for end, rows in zip(cu_keys[1:].tolist(), cu_queries.diff().tolist(), strict=True)]
    )
    causal = (token[:, None] >= index[None]) & (document[token][:, None] == document[None])
    allowed = torch.cat([causal] + [torch.eye(num_rows, dtype=torch.bool)] * (len(keys) - 1), dim=1)
    group = query.shape[1] // keys[0].shape[1]
    all_keys = torch.cat(list(keys)).repeat_interleave(group, dim=1)
    all_values = torch.cat(list(values)).repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, all_keys) * dim**-0.5
    scores = scores.masked_fill(~allowed, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), all_values)


def test_the_mask_of_the_definition_is_the_expected_matrix():
    # Two documents of 2 and 1 tokens at step 1: causal block | own index.
    query = torch.zeros(3, 1, 2)
    keys = [torch.zeros(3, 1, 2)] * 2
    values = [torch.eye(3)[:, None, :2].contiguous(), torch.zeros(3, 1, 2)]
    out = dense_attention(query, keys, values, torch.tensor([0, 2, 3]), torch.tensor([0, 2, 3]))
    # uniform weights: 1/2 over {own, diagonal}, 1/3 over {0, 1, diagonal}, 1/2 over {own, diagonal}
    expected = torch.tensor([[1 / 2, 0], [1 / 3, 1 / 3], [0, 0]])
    torch.testing.assert_close(out[:, 0], expected)


@pytest.mark.parametrize("num_steps", [1, 2, 4, 7])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("rows", [[9, 1, 14, 3], [4, 1, 14, 1], [1, 0, 5, 3]], ids=["all", "tails", "short tails"])
def test_forward_and_gradients_equal_dense(num_steps, heads, rows):
    generator = torch.Generator().manual_seed(num_steps * 10 + heads[1])
    cu_keys, cu_queries = (torch.tensor([0, *lengths]).cumsum(0).int() for lengths in ([9, 1, 14, 3], rows))

    def random(length, count):
        return torch.randn(length, count, 8, generator=generator, dtype=torch.float64, requires_grad=True)

    query = random(sum(rows), heads[0])
    keys, values = (
        [random(27, heads[1])] + [random(sum(rows), heads[1]) for _ in range(num_steps - 1)] for _ in range(2)
    )
    inputs = [query, *keys, *values]
    weights = torch.randn(query.shape, generator=generator, dtype=torch.float64)

    ours = ttt_attention(query, keys, values, cu_queries, cu_keys)
    dense = dense_attention(query, keys, values, cu_queries, cu_keys)
    torch.testing.assert_close(ours, dense, rtol=0, atol=1e-12)
    for ours_grad, dense_grad in zip(
        torch.autograd.grad((ours * weights).sum(), inputs),
        torch.autograd.grad((dense * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours_grad, dense_grad, rtol=0, atol=1e-11)
