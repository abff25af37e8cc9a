"""Closed-form TTT attention against the dense softmax it stands for."""

import pytest
import torch

from drafthead.core.attention import ttt_attention


def dense_attention(query, keys, values, cu_seqlens):
    """The definition: every allowed score written out, one softmax, no tricks."""
    num_tokens, num_heads, dim = query.shape
    document = torch.repeat_interleave(torch.arange(len(cu_seqlens) - 1), cu_seqlens.diff().long())
    index = torch.arange(num_tokens)
    causal = (index[:, None] >= index[None]) & (document[:, None] == document[None])
    allowed = torch.cat([causal] + [torch.eye(num_tokens, dtype=torch.bool)] * (len(keys) - 1), dim=1)
    group = num_heads // keys[0].shape[1]
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
    out = dense_attention(query, keys, values, torch.tensor([0, 2, 3]))
    # uniform weights: 1/2 over {own, diagonal}, 1/3 over {0, 1, diagonal}, 1/2 over {own, diagonal}
    expected = torch.tensor([[1 / 2, 0], [1 / 3, 1 / 3], [0, 0]])
    torch.testing.assert_close(out[:, 0], expected)


@pytest.mark.parametrize("num_steps", [1, 2, 4, 7])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (6, 1)])
def test_forward_and_gradients_equal_dense(num_steps, heads):
    generator = torch.Generator().manual_seed(num_steps * 10 + heads[1])
    lengths = [9, 1, 14, 3]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).int()
    num_tokens = sum(lengths)

    def random(count):
        return torch.randn(num_tokens, count, 8, generator=generator, dtype=torch.float64, requires_grad=True)

    query = random(heads[0])
    keys = [random(heads[1]) for _ in range(num_steps)]
    values = [random(heads[1]) for _ in range(num_steps)]
    inputs = [query, *keys, *values]
    weights = torch.randn(num_tokens, heads[0], 8, generator=generator, dtype=torch.float64)

    ours = ttt_attention(query, keys, values, cu_seqlens)
    dense = dense_attention(query, keys, values, cu_seqlens)
    torch.testing.assert_close(ours, dense, rtol=0, atol=1e-12)
    for ours_grad, dense_grad in zip(
        torch.autograd.grad((ours * weights).sum(), inputs),
        torch.autograd.grad((dense * weights).sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(ours_grad, dense_grad, rtol=0, atol=1e-11)
