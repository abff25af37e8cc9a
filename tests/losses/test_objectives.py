"""Every objective against its definition, differentiated by autograd."""

import math

import pytest
import torch

from drafthead.losses import rows
from drafthead.losses.objectives import GREEDY_TAU, LK_RATE, OBJECTIVES, Scored
from drafthead.losses.rows import argmax, prepare_target


def score_rows(objective, logits, teacher_logits, teacher_lse):
    """Every row against its own teacher row; the gradient unscaled."""
    target = prepare_target(objective, teacher_logits.clone(), teacher_lse)
    every, grad = torch.arange(len(logits)), torch.empty_like(logits)
    return Scored(rows.score_rows(objective, logits, target, every, torch.ones(len(logits)), grad).loss, grad)


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


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_blocks_and_shared_teacher_rows_change_nothing(monkeypatch, objective):
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(count, 8, generator=generator, dtype=torch.float64) for count in (7, 3))
    lse, met = teacher.logsumexp(-1) + 0.1, torch.tensor([0, 0, 1, 1, 1, 2, 2])
    scale = torch.rand(7, generator=generator, dtype=torch.float64)
    alone = score_rows(objective, logits, teacher[met], lse[met])
    for block_rows in (1, 2, 100):
        monkeypatch.setattr(rows, "BLOCK_ELEMENTS", 8 * block_rows)
        target = prepare_target(objective, teacher.clone(), lse)
        grad = logits.clone()
        scored = rows.score_rows(objective, grad, target, met, scale, grad)  # in place
        torch.testing.assert_close(scored.loss, alone.loss, rtol=0, atol=1e-12)
        torch.testing.assert_close(grad, scale[:, None] * alone.grad_logits, rtol=0, atol=1e-12)
        assert (scored.best == logits.argmax(-1)).all()
        assert (rows.score_rows(objective, logits, target, met, scale, None).loss == scored.loss).all()


@pytest.mark.parametrize("size", [1, 127, 128, 384, 1000])
def test_argmax_is_the_first_of_the_largest(size):
    z = torch.randint(0, 4, (50, size), generator=torch.Generator().manual_seed(size)).float()
    first = (z == z.amax(-1, keepdim=True)).int().cumsum(-1).eq(1).int().argmax(-1)
    assert (argmax(z) == first).all()
