"""The Triton kernels: interpreted where there is no GPU, run at full size where there is one; compiled in tests/gpu."""

import shutil
from dataclasses import fields, replace

import pytest
import torch

from drafthead.losses import fused
from drafthead.losses.fused import Teacher, head_loss
from drafthead.losses.objectives import OBJECTIVES
from tests.losses.problems import random_problem
from tests.rounding import rounding
from tests.scripts import run_ok, run_python

pytest.importorskip("triton")
VOCABULARIES = [32000, 32003]  # a usual one; a prime, so that no block divides it and no load is vectorised


# The installed one, which the GPU lock resolves to as well; that of torch 2.11; the newest. Docs: gpu.md.
@pytest.mark.parametrize("version", [None, *(pytest.param(v, marks=pytest.mark.soak) for v in ("3.6.0", "3.9.0"))])
def test_cases_where_this_machine_can_run_them(version, tmp_path):
    variables = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    if version:
        pip = ("-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path), f"triton=={version}")
        installed = run_python(*pip, timeout_s=600)
        if "No matching distribution" in installed.stderr:
            pytest.skip(f"Triton {version} cannot be installed here: {installed.stderr.splitlines()[-1]}")
        assert installed.returncode == 0, installed.stderr
        variables["PYTHONPATH"] = str(tmp_path)
        assert run_ok("-c", "import triton; print(triton.__version__)", **variables).strip() == version
    cases = ("tests/losses/kernel_cases.py", "tests/drafters/kernel_cases.py")
    output = run_ok("-m", "pytest", *cases, "-q", "-p", "no:cacheprovider", **variables)
    assert " passed" in output
    shutil.rmtree(tmp_path)  # 640 MB


@pytest.mark.requires_gpu
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("size", VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_loss_on_cuda_equals_the_function(monkeypatch, objective, size, dtype):
    """Gradients are as near to float64's as autograd's: where p and q cross, total variation's jumps, and rounding
    alone moves it by 3e-4."""
    monkeypatch.setitem(fused.CHUNK_ROWS, "cuda", 500)  # several chunks
    problem = random_problem(3, 400, hidden=256, vocab=size, dtype=dtype, device="cuda")
    ours, our_grads = graded(problem, objective)  # by the kernels
    expected, autograds = graded(problem, {objective: 1.0})
    torch.testing.assert_close(ours.position_sums, expected.position_sums, rtol=rounding(torch.float32, size), atol=0)
    assert (ours.predictions == expected.predictions).float().mean() > 0.999  # equal logits may differ in their order
    _, exact = graded(wide(*problem), objective)
    for grad, autograd, reference in zip(our_grads, autograds, exact, strict=True):
        assert grad.dtype == dtype
        assert distance(grad, reference) <= 2 * distance(autograd, reference)
        assert distance(autograd, reference) < (1e-3 if dtype == torch.float32 else 2e-2)


def graded(problem, objective):
    scored = head_loss(*problem, objective)
    return scored, torch.autograd.grad(scored.loss, (problem[0].states, problem[1]))


def wide(rows, weight, teacher, scale):
    """The same numbers in float64."""
    states = rows.states.detach().double().requires_grad_()
    teacher = Teacher(*(getattr(teacher, field.name).double() for field in fields(teacher)))
    return replace(rows, states=states), weight.detach().double().requires_grad_(), teacher, scale.double()


def distance(grad, reference):
    return float((grad.double() - reference).norm() / reference.norm())
