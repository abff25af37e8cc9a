"""The Triton kernels of a draft block against their PyTorch form in float64, on the GPU or interpreted on the CPU.

Not collected by its name: `tests/losses/test_kernels.py` runs it in a process of its own.
"""

import pytest
import torch

from drafthead.drafters import attention, kernels, recompute
from drafthead.drafters.layers import rotate
from tests.rounding import rounded

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def assert_same(actual, expected) -> None:
    """To the rounding of float32 and of the type that a kernel returns."""
    for ours, exact in zip(actual, expected, strict=True):
        assert ours.shape == exact.shape
        # No sum has more than 100 terms; the interpreter rounds bf16 towards zero.
        assert (ours.double() - exact).norm() <= rounded(ours.dtype, 100) * exact.norm(), ours.dtype


def gradients(function, *tensors):
    """(output, gradient of the first input, ...) of a weighted sum, in float64; and the output's gradient."""
    leaves = [tensor.double().requires_grad_() for tensor in tensors]
    out = function(*leaves)
    grad = random(*out.shape, dtype=tensors[0].dtype, seed=7)
    return (out.detach(), *torch.autograd.grad(out, leaves, grad.double())), grad


@HALF
@pytest.mark.parametrize(("rows", "size"), [(5, 24), (1, 16), (9, 100)])
def test_rms_norm(monkeypatch, dtype, rows, size):
    monkeypatch.setattr(kernels, "_PROGRAMS", 4)
    states, weight = random(rows, size, dtype=dtype), random(size, dtype=dtype, seed=1)
    expected, grad = gradients(lambda x, w: recompute.rms_norm(x, w, 1e-5), states, weight)
    out, scale = kernels.rms_norm(states, weight, 1e-5)
    assert_same((out, *kernels.rms_norm_backward(grad, states, weight, scale, True)), expected)
    assert scale.shape == (rows, 1)
    without, alone = kernels.rms_norm_backward(grad, states, weight, scale, False)
    assert without is None
    assert_same((alone,), expected[2:])


@HALF
@pytest.mark.parametrize("shape", [(3, 40), (5, 2880)])
def test_gated(dtype, shape):
    gate, up = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    expected, grad = gradients(recompute.gated, gate, up)
    assert_same((kernels.gated(gate, up), *kernels.gated_backward(grad, gate, up)), expected)


@HALF
@pytest.mark.parametrize(("heads", "dim"), [(4, 64), (3, 24), (1, 8)])
def test_rotation(dtype, heads, dim):
    states = random(6, heads, dim, dtype=dtype)
    frequencies = 1 / 100 ** (torch.arange(0, dim, 2, device=DEVICE) / dim)
    angles = torch.arange(3, 9, device=DEVICE)[:, None] * torch.cat([frequencies, frequencies])
    cos, sin = 1.2 * angles.cos()[:, None], 1.2 * angles.sin()[:, None]
    expected, grad = gradients(lambda x: rotate(x, cos.double(), sin.double()), states)
    rotated = kernels.rotate(states, cos, sin), kernels.rotate(grad, cos, sin, back=True)
    assert_same(rotated, expected)


@HALF
@pytest.mark.parametrize("steps", [1, 6])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(("heads", "groups", "dim"), [(6, 1, 24), (3, 3, 8), (16, 2, 64)])
def test_merge(dtype, steps, sinks, heads, groups, dim):
    rows, scale = 5, dim**-0.5
    query, grad_out = random(rows, heads, dim, dtype=dtype), random(rows, heads, dim, dtype=dtype, seed=3)
    pairs = [random(rows, groups, dim, dtype=dtype, seed=10 + i) for i in range(2 * steps)]
    block_out = random(rows, heads, dim, dtype=dtype, seed=4)
    block_lse = random(heads, rows, dtype=torch.float32, seed=5)  # as CUDA's flash attention has it
    if sinks:
        block_out, lse = attention._with_sinks(block_out, block_lse.T, random(heads, dtype=dtype, seed=6))
        block_lse = lse.T

    def merged(query, *pairs):
        return attention._merge_pairs(query, pairs, block_out.double(), block_lse.double().T, scale)

    exact_out, exact_lse = merged(query.double(), *(pair.double() for pair in pairs))
    out, lse = kernels.merge(query, pairs, block_out, block_lse, scale)
    assert_same((out, lse), (exact_out, exact_lse.T))
    # The backward of the entries alone: that of the text is flash attention's, with the merged output and lse.
    wide_query, wide_grad, rounded = query.double(), grad_out.double(), exact_out.to(dtype).contiguous()
    row, wanted_query, expected = attention._grouped_dot(wide_grad, rounded.double()), block_out.double(), []
    for key, value in zip(pairs[0::2], pairs[1::2], strict=True):
        probability = (attention._grouped_dot(wide_query, key.double()) * scale - exact_lse).exp()
        grad_score = probability * (attention._grouped_dot(wide_grad, value.double()) - row) * scale
        attention._add_scaled(wanted_query, grad_score, key.double())
        expected.append(attention._reduce(grad_score[..., None] * wide_query, groups))
        expected.append(attention._reduce(probability[..., None] * wide_grad, groups))
    grad_query = block_out.clone()
    gradients_of_kernel = kernels.merge_backward(grad_out, query, pairs, rounded, lse, grad_query, scale)
    assert_same((grad_query, *gradients_of_kernel), (wanted_query, *expected))
