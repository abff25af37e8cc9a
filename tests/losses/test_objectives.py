"""Every objective by hand, and at logits where its loss or gradient may not be finite."""

from math import exp, inf, log
from typing import get_args

import pytest
import torch
from pydantic import TypeAdapter, ValidationError

from drafthead.config import train
from drafthead.losses import objectives
from drafthead.losses.objectives import LK_RATE, OBJECTIVES


def random_rows(spread=1.0, num_rows=30, size=5):
    """Logits of draft and target (B, D), and the target's log-sum-exp (B,), a part of it outside the vocabulary."""
    generator = torch.Generator().manual_seed(0)
    z, target = (spread * torch.randn(num_rows, size, generator=generator, dtype=torch.float64) for _ in range(2))
    return z, target, target.logsumexp(-1) + torch.rand(num_rows, generator=generator)


def scored(objective, z, target_logits, target_lse):
    """Loss and unscaled gradient, every row against its own teacher row."""
    target = objectives.prepare_target(objective, target_logits.clone(), target_lse)
    grad = torch.empty_like(z)
    return objectives.score_rows(objective, z, target, torch.arange(len(z)), torch.ones(len(z)), grad).loss, grad


def test_the_recipe_offers_every_objective():
    assert get_args(train.ObjectiveName) == tuple(OBJECTIVES)
    for objective in (*OBJECTIVES, {"forward_kl": 0.9, "total_variation": 0.1}):
        assert TypeAdapter(train.Objective).validate_python(objective) == objective


@pytest.mark.parametrize("objective", ["focal", {"focal": 1.0}, {"forward_kl": 0.0}, {}], ids=str)
def test_the_recipe_refuses_other_names_and_coefficients(objective):
    with pytest.raises(ValidationError):
        TypeAdapter(train.Objective).validate_python(objective)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        ("forward_kl", 0.625 * log(0.625 / 0.9) + 0.375 * log(0.375 / 0.1)),
        ("total_variation", 0.4),
        ("lk_hybrid", 0.4 + exp(-LK_RATE * 0.6) * (0.625 * log(0.625 / 0.9) + 0.375 * log(0.375 / 0.1) - 0.4)),
        ("cross_entropy", -log(0.9)),
    ],
)
def test_by_hand(objective, expected):
    p = torch.tensor([[0.5, 0.3]])  # 0.2 lies outside the draft vocabulary, so r = 0.625, 0.375
    q = torch.tensor([[0.9, 0.1]])
    loss, _ = scored(objective, q.log(), p.log(), torch.zeros(1))
    assert loss.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("objective", [*OBJECTIVES, {"forward_kl": 0.5, "cross_entropy": 0.5}], ids=str)
def test_which_objectives_depend_on_the_mass_of_the_draft_tokens(objective):
    z, target, lse = random_rows()
    same = all(map(torch.equal, scored(objective, z, target, lse), scored(objective, z, target, lse + 1)))
    assert same != objectives.reads_mass(objective)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("masked", [(0, 1), (2, 4)])
@pytest.mark.parametrize(("draft", "target"), [(True, False), (False, True), (True, True)])
def test_a_logit_of_minus_infinity_never_trains_wrongly(objective, masked, draft, target):
    """No product of finite states and weights is one. Loss and gradient are right, or the loss is not finite, which
    ends training.
    """
    z, target_logits, lse = random_rows()
    for logits, mask in ((z, draft), (target_logits, target)):
        if mask:
            logits[:, masked] = -inf
    loss, grad = scored(objective, z, target_logits, lse)
    expected, wanted_grad = scored(objective, z.clamp(min=-1e9), target_logits.clamp(min=-1e9), lse)
    known, whole = loss.isfinite(), grad.isfinite().all(-1)
    assert known.any() or objective in ("forward_kl", "lk_hybrid")
    assert whole[known].all()
    assert whole.all()
    torch.testing.assert_close(loss[known], expected[known])
    torch.testing.assert_close(grad[whole], wanted_grad[whole])


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_extreme_logits_stay_finite(objective):
    target_logits = torch.tensor([[-1e4, 0.0, 1e4]])
    for values in scored(objective, torch.tensor([[1e4, 0.0, -1e4]]), target_logits, target_logits.logsumexp(-1)):
        assert values.isfinite().all()


@pytest.mark.parametrize("size", [1, 127, 128, 384, 1000])
def test_argmax_is_the_first_of_the_largest(size):
    z = torch.randint(0, 4, (50, size), generator=torch.Generator().manual_seed(size)).float()
    first = (z == z.amax(-1, keepdim=True)).int().cumsum(-1).eq(1).int().argmax(-1)
    assert (objectives.argmax(z) == first).all()
