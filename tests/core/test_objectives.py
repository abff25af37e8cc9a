"""Every objective against its definition, differentiated by autograd."""

import math

import pytest
import torch

from drafthead.core.objectives import GREEDY_TAU, LK_RATE, OBJECTIVES, score_rows


def definition(objective, logits, p_full, draft_ids):
    """The formulas of the module docstring, from the target's full distribution."""
    p = p_full[:, draft_ids]
    r = p / p.sum(-1, keepdim=True)
    q = logits.softmax(-1)
    kl = (r * (r / q).log()).sum(-1)
    accepted = torch.minimum(p, q).sum(-1)
    weight = torch.exp(-LK_RATE * accepted).detach()
    return {
        "forward_kl": kl,
        "reverse_kl": (q * (q / r).log()).sum(-1),
        "total_variation": 1 - accepted,
        "lk_hybrid": weight * kl + (1 - weight) * (1 - accepted),
        "greedy_acceptance": 1 - ((logits / GREEDY_TAU).softmax(-1) * p).sum(-1),
    }[objective]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_loss_and_gradient_equal_the_definition(objective, spread):
    generator = torch.Generator().manual_seed(0)
    draft_ids = torch.tensor([0, 2, 3, 7, 9])
    target_logits = spread * torch.randn(30, 12, generator=generator, dtype=torch.float64)
    logits = (spread * torch.randn(30, 5, generator=generator, dtype=torch.float64)).requires_grad_()
    scored = score_rows(objective, logits.detach(), target_logits[:, draft_ids], target_logits.logsumexp(-1))
    wanted = definition(objective, logits, target_logits.softmax(-1), draft_ids)
    torch.testing.assert_close(scored.loss, wanted.detach(), rtol=0, atol=1e-12)
    (gradient,) = torch.autograd.grad(wanted.sum(), logits)
    torch.testing.assert_close(scored.grad_logits, gradient, rtol=0, atol=1e-12)


def test_total_variation_is_the_rejection_probability_by_hand():
    p = torch.tensor([[0.5, 0.3]])  # 0.2 lies outside the draft vocabulary
    logits = torch.tensor([[0.9, 0.1]]).log()
    scored = score_rows("total_variation", logits, p.log(), torch.zeros(1))
    assert scored.loss.item() == pytest.approx(1 - (0.5 + 0.1))


def test_greedy_acceptance_tends_to_the_probability_of_the_argmax():
    p = torch.tensor([[0.2, 0.7]])
    logits = torch.tensor([[30.0, 0.0]])  # the draft is sure of the wrong token
    assert score_rows("greedy_acceptance", logits, p.log(), torch.zeros(1)).loss.item() == pytest.approx(0.8)


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, 0.0, -1e4]])
    teacher = torch.tensor([[-1e4, 0.0, 1e4]])
    for objective in OBJECTIVES:
        scored = score_rows(objective, logits, teacher, teacher.logsumexp(-1))
        assert math.isfinite(scored.loss.item()), objective
        assert scored.grad_logits.isfinite().all(), objective
