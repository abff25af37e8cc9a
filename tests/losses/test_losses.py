"""The fused, chunked head and loss against plain logits and autograd."""

from typing import get_args

import pytest
import torch

from drafthead.config import TrainConfig
from drafthead.losses import fused as losses
from drafthead.losses.fused import Teacher, head_loss
from drafthead.losses.objectives import FORMULAS, OBJECTIVES


def dense_loss(states, weight, teacher, valid, scale):
    """All logits at once, differentiated by autograd."""
    log_p_all = (teacher.hidden @ teacher.weight.T).log_softmax(-1)
    total = 0
    for k in range(states.shape[0]):
        index = valid[k].nonzero()[:, 0]
        log_p = log_p_all[index + 1 + k]
        log_q = (states[k, index] @ weight.T).log_softmax(-1)
        total = total + scale[k] * (log_p.exp() * (log_p - log_q)).sum()
    return total


def random_problem(num_steps, num_tokens, seed=0, hidden=6, vocab=9):
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(num_steps, num_tokens, hidden, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = Teacher(
        torch.randn(num_tokens, hidden, generator=generator, dtype=torch.float64),
        torch.randn(vocab, hidden, generator=generator, dtype=torch.float64),
        torch.full((num_tokens,), 20.0, dtype=torch.float64),
    )
    valid = torch.rand(num_steps, num_tokens, generator=generator) < 0.6
    for k in range(num_steps):
        valid[k, max(num_tokens - 1 - k, 0) :] = False  # the teacher row t + 1 + k must exist
    scale = torch.rand(num_steps, generator=generator, dtype=torch.float64)
    return states, weight, teacher, valid, scale


@pytest.mark.parametrize("chunk", [1, 3, 16, 512])
@pytest.mark.parametrize("num_steps", [1, 4, 7])
def test_loss_and_gradients_equal_dense(monkeypatch, chunk, num_steps):
    monkeypatch.setitem(losses.CHUNK_ROWS, "cpu", chunk)
    states, weight, teacher, valid, scale = random_problem(num_steps, 23, seed=chunk)
    fused = head_loss(states, weight, teacher, valid, scale)
    dense = dense_loss(states, weight, teacher, valid, scale)
    torch.testing.assert_close(fused.loss, dense, rtol=0, atol=1e-12)
    fused_grads = torch.autograd.grad(3.0 * fused.loss, (states, weight))
    dense_grads = torch.autograd.grad(3.0 * dense, (states, weight))
    for fused_grad, dense_grad in zip(fused_grads, dense_grads, strict=True):
        torch.testing.assert_close(fused_grad, dense_grad, rtol=0, atol=1e-11)


def test_the_loss_is_its_step_sums_and_predictions_are_the_best_tokens():
    states, weight, teacher, valid, scale = random_problem(3, 12)
    fused = head_loss(states, weight, teacher, valid, scale)
    torch.testing.assert_close((fused.step_sums * scale).sum(), fused.loss.detach())
    best = (states @ weight.T).argmax(-1)
    assert (fused.predictions[valid] == best[valid]).all()
    assert (fused.predictions[~valid] == -1).all()


def test_a_perfect_draft_has_no_loss_and_no_gradient():
    _, _, teacher, valid, scale = random_problem(1, 10)
    states = torch.zeros(1, 10, 6, dtype=torch.float64)
    states[0, :9] = teacher.hidden[1:]
    states.requires_grad_()
    fused = head_loss(states, teacher.weight, teacher, valid, scale)
    torch.testing.assert_close(fused.loss, torch.zeros((), dtype=torch.float64))
    (grad,) = torch.autograd.grad(fused.loss, states)
    torch.testing.assert_close(grad, torch.zeros_like(grad))


def test_nothing_valid_is_zero_loss():
    states, weight, teacher, valid, scale = random_problem(2, 8)
    fused = head_loss(states, weight, teacher, torch.zeros_like(valid), scale)
    assert fused.loss == 0
    assert (fused.predictions == -1).all()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_chunk_size_gives_the_same(monkeypatch, objective):
    states, weight, teacher, valid, scale = random_problem(3, 40, seed=1)
    valid[1] = False  # a step without rows
    results = []
    for chunk in (1, 4, 9, 30, 4096):  # 1: fewer rows than steps; 9: teacher tokens straddle its borders
        monkeypatch.setitem(losses.CHUNK_ROWS, "cpu", chunk)
        fused = head_loss(states, weight, teacher, valid, scale, objective)
        results.append([fused.loss, fused.step_sums, *torch.autograd.grad(fused.loss, (states, weight))])
        assert ((fused.predictions == -1) == ~valid).all()
    for other in results[1:]:
        for one, reference in zip(other, results[0], strict=True):
            torch.testing.assert_close(one, reference, rtol=0, atol=1e-12)


def test_bfloat16_follows_float32():
    states, weight, teacher, valid, scale = random_problem(2, 60, hidden=16, vocab=50)
    half = [tensor.detach().bfloat16().requires_grad_() for tensor in (states, weight)]
    half_teacher = Teacher(teacher.hidden.bfloat16(), teacher.weight.bfloat16(), teacher.lse.float())
    wide = [tensor.detach().float().requires_grad_() for tensor in half]
    wide_teacher = Teacher(half_teacher.hidden.float(), half_teacher.weight.float(), half_teacher.lse)
    fused, reference = (
        head_loss(*tensors, given, valid, scale.float())
        for tensors, given in ((half, half_teacher), (wide, wide_teacher))
    )
    torch.testing.assert_close(fused.loss, reference.loss, rtol=1e-2, atol=0)
    for grad, wanted in zip(
        torch.autograd.grad(fused.loss, half), torch.autograd.grad(reference.loss, wide), strict=True
    ):
        assert grad.dtype == torch.bfloat16
        assert (grad.float() - wanted).norm() < 0.03 * wanted.norm()


def test_gradients_are_handed_out_once():
    states, weight, teacher, valid, scale = random_problem(2, 8)
    fused = head_loss(states, weight, teacher, valid, scale)
    fused.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call head_loss again"):
        fused.loss.backward()
    again = head_loss(states, weight, teacher, valid, scale)
    (grad,) = torch.autograd.grad(again.loss.square(), states, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_an_unknown_objective_is_refused_by_name_even_where_nothing_counts():
    states, weight, teacher, valid, scale = random_problem(2, 5)
    with pytest.raises(ValueError, match=r"objective 'focal' is not known; choose one of forward_kl, reverse_kl"):
        head_loss(states, weight, teacher, torch.zeros_like(valid), scale, "focal")


def test_the_recipe_offers_every_objective_there_is():
    assert get_args(TrainConfig.model_fields["objective"].annotation) == OBJECTIVES == tuple(FORMULAS)
