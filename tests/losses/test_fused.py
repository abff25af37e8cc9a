"""The fused, chunked head and loss against plain logits and autograd."""

from types import SimpleNamespace

import pytest
import torch

from drafthead.losses import fused as losses
from drafthead.losses.fused import HeadRows, Teacher, head_loss
from drafthead.losses.objectives import OBJECTIVES, Target, loss_function
from tests.losses.problems import random_problem, ttt_rows


def dense_loss(states, weight, teacher, valid, scale, objective="forward_kl"):
    """All logits at once, differentiated by autograd."""
    log_r = (teacher.hidden @ teacher.weight.T).log_softmax(-1)
    total = 0
    for k in range(states.shape[0]):
        index = valid[k].nonzero()[:, 0]
        target = Target(log_r[index + 1 + k], torch.ones(len(index), 1))
        total = total + scale[k] * loss_function(objective)(states[k, index] @ weight.T, target).sum()
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


@pytest.mark.parametrize("objective", ["focal", {"forward_kl": 0.5, "focal": 0.5}])
def test_an_unknown_objective_is_refused_by_name_even_where_nothing_counts(objective):
    states, weight, teacher, valid, scale = random_problem(2, 5)
    with pytest.raises(ValueError, match=r"'focal'.*forward_kl, reverse_kl"):
        head_loss(ttt_rows(states, torch.zeros_like(valid)), weight, teacher, scale, objective)


def test_a_new_loss_is_a_function_and_one_line(monkeypatch):
    """It trains a linear head, with the gradient that autograd finds over plain logits."""

    def jensen_shannon(z, target):
        q = z.softmax(-1)
        middle = ((q + target.r) / 2).log()
        return ((target.r * (target.log_r - middle) + q * (q.log() - middle)) / 2).sum(-1)

    monkeypatch.setitem(OBJECTIVES, "jensen_shannon", jensen_shannon)
    states, weight, teacher, valid, scale = random_problem(2, 40)
    optimizer = torch.optim.Adam([weight], lr=0.05)
    history = []
    for _ in range(30):
        fused = head_loss(ttt_rows(states, valid), weight, teacher, scale, "jensen_shannon")
        dense = dense_loss(states, weight, teacher, valid, scale, "jensen_shannon")
        torch.testing.assert_close(fused.loss, dense, rtol=0, atol=1e-12)
        weight.grad, wanted = (torch.autograd.grad(loss, weight)[0] for loss in (fused.loss, dense))
        torch.testing.assert_close(weight.grad, wanted, rtol=0, atol=1e-12)
        optimizer.step()
        history.append(fused.loss.item())
    assert history[-1] < 0.8 * history[0]


@pytest.mark.parametrize(
    ("objective", "dtype", "device", "module"),
    [
        ("forward_kl", torch.bfloat16, "cuda", "kernels"),
        ("forward_kl", torch.float64, "cuda", "objectives"),
        ("forward_kl", torch.float32, "cpu", "objectives"),
        ("not_written", torch.float32, "cuda", "objectives"),
        ({"forward_kl": 1.0}, torch.float32, "cuda", "objectives"),
    ],
)
def test_what_has_no_kernel_runs_in_pytorch(objective, dtype, device, module):
    pytest.importorskip("triton")
    states = SimpleNamespace(is_cuda=device == "cuda", dtype=dtype)
    assert losses._passes(objective, states).__name__ == f"drafthead.losses.{module}"


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
