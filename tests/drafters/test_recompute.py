"""Results that the backward computes again; that they are not kept is measured in tests/planning/test_memory.py."""

import torch

from drafthead.drafters.recompute import recomputing, rms_norm

EPS = 1e-5


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
