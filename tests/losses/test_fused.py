"""The fused, chunked head and loss against plain logits and autograd."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from drafthead.losses import fused, objectives
from drafthead.losses.fused import Teacher, head_loss
from drafthead.losses.objectives import OBJECTIVES, Target, loss_function
from tests.losses.problems import random_problem
from tests.rounding import rounded


def dense_loss(rows, weight, teacher, scale, objective):
    """All logits at once, differentiated by autograd."""
    scored = rows.teacher >= 0
    logits, lse = (teacher.hidden @ teacher.weight.T)[rows.teacher[scored]], teacher.lse[rows.teacher[scored]]
    target = Target(logits.log_softmax(-1), (logits.logsumexp(-1) - lse).exp()[:, None])
    losses = loss_function(objective)(rows.states[scored] @ weight.T, target)
    return (scale.repeat_interleave(torch.tensor(rows.counts))[scored] * losses).sum()


def jensen_shannon(z, target):
    q = z.softmax(-1)
    middle = ((q + target.r) / 2).log()
    return ((target.r * (target.log_r - middle) + q * (q.log() - middle)) / 2).sum(-1)


def gradients(loss, *tensors):
    return torch.autograd.grad(3.0 * loss, tensors)


def assert_same(ours, reference, atol=1e-12):
    for one, other in zip(ours, reference, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=atol)


# Rows of a chunk and of a block. 1: fewer rows than steps; 9: tokens straddle its borders
@pytest.mark.parametrize(("chunk", "block"), [(1, 100), (4, 1), (9, 2), (30, 2), (4096, 100)])
@pytest.mark.parametrize("num_steps", [1, 3, 7])
@pytest.mark.parametrize("objective", [*OBJECTIVES, {"forward_kl": 0.9, "total_variation": 0.1}, "new"], ids=str)
def test_loss_and_gradients_equal_dense(monkeypatch, objective, num_steps, chunk, block):
    monkeypatch.setitem(OBJECTIVES, "new", jensen_shannon)  # a new loss is a function and one line
    monkeypatch.setitem(fused.CHUNK_ROWS, "cpu", chunk)
    monkeypatch.setitem(objectives.BLOCK_ELEMENTS, "cpu", 9 * block)
    rows, weight, teacher, scale = random_problem(num_steps, 23)
    rows.teacher[23:46] = -1  # a step without rows
    ours, dense = (loss(rows, weight, teacher, scale, objective) for loss in (head_loss, dense_loss))
    assert_same([ours.loss], [dense])
    assert_same(gradients(ours.loss, rows.states, weight), gradients(dense, rows.states, weight), atol=1e-11)
    torch.testing.assert_close((ours.position_sums * scale).sum(), ours.loss.detach())
    best = torch.where(rows.teacher >= 0, (rows.states @ weight.T).argmax(-1), -1)
    assert (ours.predictions == best).all()
    with torch.no_grad():
        without_gradient = head_loss(rows, weight, teacher, scale, objective)
    assert all(map(torch.equal, without_gradient, ours))


def test_no_scored_row_is_zero_loss():
    rows, weight, teacher, scale = random_problem(2, 8)
    scored = head_loss(replace(rows, teacher=torch.full_like(rows.teacher, -1)), weight, teacher, scale)
    assert scored.loss == 0
    assert (scored.predictions == -1).all()


def test_on_a_cpu_bfloat16_is_the_loss_of_rounded_logits():
    """Products are rounded once, and softmax and loss are float32: chunks and blocks lose nothing more."""
    rows, weight, teacher, scale = random_problem(3, 40, hidden=16, vocab=50, dtype=torch.bfloat16)
    ours = head_loss(rows, weight, teacher, scale)
    logits = (rows.states @ weight.T).float().detach().requires_grad_()
    identity, rounded = torch.eye(50), (teacher.hidden @ teacher.weight.T).float()
    expected = dense_loss(
        replace(rows, states=logits), identity, Teacher(rounded, identity, teacher.lse), scale, "forward_kl"
    )
    torch.testing.assert_close(ours.loss, expected, rtol=1e-5, atol=0)
    (slope,) = torch.autograd.grad(expected, logits)
    grads = torch.autograd.grad(ours.loss, (rows.states, weight))
    for gradient, product in zip(grads, (slope @ weight.float(), slope.T @ rows.states.float()), strict=True):
        assert (gradient - product).norm() < 5e-3 * product.norm()


def test_bfloat16_follows_float32():
    rows, weight, teacher, scale = random_problem(2, 60, hidden=16, vocab=50, dtype=torch.bfloat16)
    wide = [tensor.detach().float().requires_grad_() for tensor in (rows.states, weight)]
    wide_teacher = Teacher(teacher.hidden.float(), teacher.weight.float(), teacher.lse)
    ours = head_loss(rows, weight, teacher, scale).loss
    reference = head_loss(replace(rows, states=wide[0]), wide[1], wide_teacher, scale).loss
    torch.testing.assert_close(ours, reference, rtol=rounded(torch.bfloat16, 50), atol=0)
    for grad, reference_grad in zip(gradients(ours, rows.states, weight), gradients(reference, *wide), strict=True):
        assert grad.dtype == torch.bfloat16
        # Logits, probabilities, their gradient and the result: four roundings by half of eps.
        assert (grad.float() - reference_grad).norm() < rounded(torch.bfloat16, 120, times=2) * reference_grad.norm()


def test_gradients_are_returned_once():
    rows, weight, teacher, scale = random_problem(2, 8)
    loss = head_loss(rows, weight, teacher, scale).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="head_loss"):
        loss.backward()
    again = head_loss(rows, weight, teacher, scale).loss
    (grad,) = torch.autograd.grad(again.square(), rows.states, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("objective", "dtype", "is_cuda", "module"),
    [
        ("forward_kl", torch.bfloat16, True, "kernels"),
        ("forward_kl", torch.float64, True, "objectives"),
        ("forward_kl", torch.float32, False, "objectives"),
        ("total_variation", torch.float32, True, "objectives"),
        ({"forward_kl": 1.0}, torch.float32, True, "objectives"),
    ],
)
def test_what_has_no_kernel_runs_in_pytorch(objective, dtype, is_cuda, module):
    pytest.importorskip("triton")
    passes = fused._passes(objective, SimpleNamespace(is_cuda=is_cuda, dtype=dtype))
    assert passes.__name__ == f"drafthead.losses.{module}"
