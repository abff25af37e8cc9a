"""The Triton kernels against the PyTorch form, on the GPU or, under TRITON_INTERPRET=1, on the CPU.

Not collected by its name: `test_kernels.py` runs it in a process of its own, since Triton reads that
variable once, at import. By hand: TRITON_INTERPRET=1 .venv/bin/python -m pytest tests/losses/kernel_cases.py
"""

import pytest
import torch

from drafthead.losses import kernels, objectives
from drafthead.losses.objectives import ANALYTIC_OBJECTIVE
from tests.rounding import rounding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
GPT_OSS = 201_088 if torch.cuda.is_available() else 3 * kernels.BLOCK + 7  # interpreted, more blocks show nothing more


def problem(size):
    """Draft logits (R, D), target logits (C, D) and log-sum-exp (C,), met tokens (R,), scale (R,)."""
    generator, num_rows, num_tokens = torch.Generator().manual_seed(0), 6, 3
    logits, target = (3 * torch.randn(count, size, generator=generator) for count in (num_rows, num_tokens))
    logits[0].clamp_(max=1.0)  # many are equally likely: the first is best
    lse = target.logsumexp(-1) + 0.3  # a quarter of the target's mass lies outside the draft vocabulary
    met = torch.arange(num_rows) * num_tokens // num_rows
    scale = torch.rand(num_rows, generator=generator)
    return [tensor.to(DEVICE) for tensor in (logits, target, lse, met, scale)]


def both_forms(size, grad_dtype, block):
    """(loss, best, gradient) of the kernels, and of the PyTorch form in float64."""
    logits, target_logits, lse, met, scale = problem(size)
    exact = [tensor.double() for tensor in (logits, target_logits, lse)]
    exact_grad = torch.empty_like(exact[0])
    exact_target = objectives.prepare_target(ANALYTIC_OBJECTIVE, exact[1], exact[2])
    expected = objectives.score_rows(ANALYTIC_OBJECTIVE, exact[0], exact_target, met, scale.double(), exact_grad)

    grad = logits if grad_dtype == torch.float32 else torch.empty_like(logits, dtype=grad_dtype)
    target = kernels.prepare_target(ANALYTIC_OBJECTIVE, target_logits, lse, block)
    scored = kernels.score_rows(ANALYTIC_OBJECTIVE, logits, target, met, scale, grad, block)
    return (*scored, grad), (*expected, exact_grad)


def assert_same(ours, exact):
    loss, best, grad = ours
    # Logits are about as large as 10: a log-probability is so much less exact, and so is what its exponential scales.
    of_sum = 10 * rounding(torch.float32, grad.shape[1])
    torch.testing.assert_close(loss.double(), exact[0], rtol=0, atol=of_sum)
    assert (best == exact[1]).all()
    error, allowed = (grad.double() - exact[2]).norm(dim=-1), torch.finfo(grad.dtype).eps + of_sum
    # Next to nothing is left of probabilities up to 1 that cancel each other out.
    assert (error <= allowed * exact[2].norm(dim=-1) + 10 * torch.finfo(torch.float32).eps).all(), (error, exact[2])


@pytest.mark.parametrize(
    ("size", "block"),
    [(1, 16), (16, 16), (100, 16), (77, 128), (GPT_OSS, kernels.BLOCK)],
    ids=["one", "exact", "uneven blocks", "one block", "gpt-oss"],
)
@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16], ids=["in place", "bf16"])
def test_kernels_equal_the_pytorch_form(size, block, grad_dtype):
    assert_same(*both_forms(size, grad_dtype, block))


def test_without_gradient_the_logits_stay():
    logits, target_logits, lse, met, scale = problem(40)
    target = kernels.prepare_target(ANALYTIC_OBJECTIVE, target_logits, lse, 16)
    before = logits.clone()
    alone = kernels.score_rows(ANALYTIC_OBJECTIVE, logits, target, met, scale, None, 16)
    assert (logits == before).all()
    with_gradient = kernels.score_rows(ANALYTIC_OBJECTIVE, logits, target, met, scale, logits, 16)
    assert (alone.loss == with_gradient.loss).all()


def test_extreme_logits_stay_finite():
    logits = torch.tensor([[1e4, 0.0, -1e4]], device=DEVICE)
    target_logits = torch.tensor([[-1e4, 0.0, 1e4]], device=DEVICE)
    target = kernels.prepare_target(ANALYTIC_OBJECTIVE, target_logits.clone(), target_logits.logsumexp(-1), 16)
    met, scale, grad = torch.zeros(1, dtype=torch.long, device=DEVICE), torch.ones(1, device=DEVICE), logits.clone()
    scored = kernels.score_rows(ANALYTIC_OBJECTIVE, logits, target, met, scale, grad, 16)
    assert scored.loss.isfinite().all()
    assert grad.isfinite().all()


@pytest.mark.parametrize("masked", [slice(0, 16), slice(3, 20, 4), slice(32, 40)])
def test_a_logit_of_minus_infinity_never_trains_wrongly(masked):
    """As the PyTorch form: loss and gradient are right, or the loss is not finite, which ends training."""
    logits, target_logits, lse, met, scale = problem(40)
    logits[:, masked] = target_logits[:, masked] = float("-inf")
    results = []
    for lowest in (float("-inf"), -1e4):
        target = kernels.prepare_target(ANALYTIC_OBJECTIVE, target_logits.clamp(min=lowest), lse, 16)
        grad = logits.clamp(min=lowest)
        results.append((kernels.score_rows(ANALYTIC_OBJECTIVE, grad, target, met, scale, grad, 16).loss, grad))
    (loss, grad), (expected, wanted_grad) = results
    known, whole = loss.isfinite(), grad.isfinite().all(-1)
    nothing_first = masked == slice(0, 16)  # a first block without a logit: neither is finite
    assert not known.all()
    assert not known.any() if nothing_first else whole.all()
    torch.testing.assert_close(loss[known], expected[known])
    torch.testing.assert_close(grad[whole], wanted_grad[whole])
