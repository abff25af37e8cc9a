"""The fused, chunked head and loss against plain logits and autograd."""

from typing import get_args

import pytest
import torch

from drafthead.config import TrainConfig
from drafthead.losses import fused as losses
from drafthead.losses.fused import HeadRows, Teacher, head_loss
from drafthead.losses.objectives import FORMULAS, OBJECTIVES
from tests.losses.problems import random_problem, ttt_rows


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


@pytest.mark.parametrize("chunk", [1, 3, 16, 512])
@pytest.mark.parametrize("num_steps", [1, 4, 7])
def test_loss_and_gradients_equal_dense(monkeypatch, chunk, num_steps):
    monkeypatch.setitem(losses.CHUNK_ROWS, "cpu", chunk)
    states, weight, teacher, valid, scale = random_problem(num_steps, 23, seed=chunk)
    fused = head_loss(ttt_rows(states, valid), weight, teacher, scale)
    dense = dense_loss(states, weight, teacher, valid, scale)
    torch.testing.assert_close(fused.loss, dense, rtol=0, atol=1e-12)
    fused_grads = torch.autograd.grad(3.0 * fused.loss, (states, weight))
    dense_grads = torch.autograd.grad(3.0 * dense, (states, weight))
    for fused_grad, dense_grad in zip(fused_grads, dense_grads, strict=True):
        torch.testing.assert_close(fused_grad, dense_grad, rtol=0, atol=1e-11)


def test_the_loss_is_its_position_sums_and_predictions_are_the_best_tokens():
    states, weight, teacher, valid, scale = random_problem(3, 12)
    fused = head_loss(ttt_rows(states, valid), weight, teacher, scale)
    torch.testing.assert_close((fused.position_sums * scale).sum(), fused.loss.detach())
    best = (states @ weight.T).argmax(-1)
    assert (fused.predictions.view_as(valid)[valid] == best[valid]).all()
    assert (fused.predictions.view_as(valid)[~valid] == -1).all()


def test_a_perfect_draft_has_no_loss_and_no_gradient():
    _, _, teacher, valid, scale = random_problem(1, 10)
    states = torch.zeros(1, 10, 6, dtype=torch.float64)
    states[0, :9] = teacher.hidden[1:]
    states.requires_grad_()
    fused = head_loss(ttt_rows(states, valid), teacher.weight, teacher, scale)
    torch.testing.assert_close(fused.loss, torch.zeros((), dtype=torch.float64))
    (grad,) = torch.autograd.grad(fused.loss, states)
    torch.testing.assert_close(grad, torch.zeros_like(grad))


def test_nothing_valid_is_zero_loss():
    states, weight, teacher, valid, scale = random_problem(2, 8)
    fused = head_loss(ttt_rows(states, torch.zeros_like(valid)), weight, teacher, scale)
    assert fused.loss == 0
    assert (fused.predictions == -1).all()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_every_chunk_size_gives_the_same(monkeypatch, objective):
    states, weight, teacher, valid, scale = random_problem(3, 40, seed=1)
    valid[1] = False  # a step without rows
    results = []
    for chunk in (1, 4, 9, 30, 4096):  # 1: fewer rows than steps; 9: teacher tokens straddle its borders
        monkeypatch.setitem(losses.CHUNK_ROWS, "cpu", chunk)
        fused = head_loss(ttt_rows(states, valid), weight, teacher, scale, objective)
        results.append([fused.loss, fused.position_sums, *torch.autograd.grad(fused.loss, (states, weight))])
        assert ((fused.predictions == -1) == ~valid.flatten()).all()
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
        head_loss(ttt_rows(tensors[0], valid), tensors[1], given, scale.float())
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
    fused = head_loss(ttt_rows(states, valid), weight, teacher, scale)
    fused.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="call head_loss again"):
        fused.loss.backward()
    again = head_loss(ttt_rows(states, valid), weight, teacher, scale)
    (grad,) = torch.autograd.grad(again.loss.square(), states, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_an_unknown_objective_is_refused_by_name_even_where_nothing_counts():
    states, weight, teacher, valid, scale = random_problem(2, 5)
    with pytest.raises(ValueError, match=r"objective 'focal' is not known; choose one of forward_kl, reverse_kl"):
        head_loss(ttt_rows(states, torch.zeros_like(valid)), weight, teacher, scale, "focal")


def test_the_recipe_offers_every_objective_there_is():
    assert get_args(TrainConfig.model_fields["objective"].annotation) == OBJECTIVES == tuple(FORMULAS)


def test_chunks_list_every_scored_row_once_beside_its_teacher():
    # 3 draft positions of 5, 3 and 4 rows, chunks of two teacher tokens
    teacher = torch.tensor([1, 2, -1, 4, -1, 2, -1, 4, -1, 4, -1, -1])
    found = list(losses._chunks(teacher, 3, 7))
    assert [chunk.tokens.tolist() for chunk in found] == [[1, 2], [4]]
    assert [chunk.rows.tolist() for chunk in found] == [[0, 1, 5], [3, 7, 9]]
    assert [chunk.met.tolist() for chunk in found] == [[0, 1, 1], [0, 0, 0]]
    assert list(losses._chunks(torch.full((5,), -1), 3, 7)) == []


def test_draft_positions_may_have_different_numbers_of_rows():
    """Rows that are not scored may be left out: the same sums, predictions and gradients."""
    states, weight, teacher, valid, scale = random_problem(3, 12)
    every = ttt_rows(states, valid)
    kept = every.teacher >= 0
    some = HeadRows(every.states[kept], every.teacher[kept], tuple(valid.sum(1).tolist()))
    results = []
    for rows in (every, some):
        fused = head_loss(rows, weight, teacher, scale)
        results.append([fused.loss, fused.position_sums, *torch.autograd.grad(fused.loss, (states, weight))])
        assert (fused.predictions[rows.teacher >= 0] == (every.states @ weight.T).argmax(-1)[kept]).all()
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
