"""Results that the backward computes again give the gradients of the plain formulas, and are not kept."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

from drafthead.drafters.recompute import gated, recomputing, rms_norm

EPS = 1e-5


def plain_norm(states: Tensor, weight: Tensor) -> Tensor:
    return states * torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + EPS) * weight


def block(lean: bool, leaves: list[Tensor]) -> Tensor:
    """Two norms, a gated unit, and products that need their inputs for the backward."""
    left, right, norm, gate, up, down = leaves
    norms = (lambda x: rms_norm(x, norm, EPS)) if lean else (lambda x: plain_norm(x, norm))
    first, second = norms(left) @ gate, norms(right) @ up
    inner = gated(first, second) if lean else torch.nn.functional.silu(first) * second
    return (inner @ down).pow(2).sum()


def leaves() -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    sizes = ((5, 4), (5, 4), (4,), (4, 6), (4, 6), (6, 3))
    return [torch.randn(size, generator=draw, dtype=torch.float64).requires_grad_() for size in sizes]


@pytest.mark.parametrize("context", [nullcontext, recomputing])
def test_gradients_are_those_of_the_plain_formulas(context):
    ours, wanted = leaves(), leaves()
    with context():
        loss = block(True, ours)
    expected = torch.autograd.grad(block(False, wanted), wanted)
    for got, want in zip(torch.autograd.grad(loss, ours), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_results_are_not_kept():
    states, weight = torch.randn(7, 4), torch.ones(4, requires_grad=True)
    matrix = torch.randn(4, 3, requires_grad=True)
    result = rms_norm(states, weight, EPS)
    assert (result @ matrix).grad_fn._saved_self.data_ptr() == result.data_ptr()
    with recomputing():
        product = result @ matrix
    again = product.grad_fn._saved_self
    assert again.data_ptr() != result.data_ptr()
    assert torch.equal(again, result)


def test_a_changed_weight_does_not_change_what_is_made_again():
    """ZeRO-3 empties parameters between the modules that use them."""
    states, weight = torch.randn(7, 4, requires_grad=True), torch.nn.Parameter(torch.rand(4) + 0.5)
    matrix = torch.randn(4, 3, requires_grad=True)
    with recomputing():
        loss = (rms_norm(states, weight, EPS) @ matrix).sum()
    before = rms_norm(states, weight, EPS).detach()
    weight.data = torch.empty(0)
    (gradient,) = torch.autograd.grad(loss, [matrix])
    torch.testing.assert_close(gradient, before.sum(0)[:, None].expand(4, 3))
