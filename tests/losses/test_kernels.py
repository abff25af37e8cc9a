"""The Triton kernels: interpreted where there is no GPU, run at full size where there is one; compiled in tests/gpu."""

import shutil

import pytest
import torch

from drafthead.losses import fused
from drafthead.losses.fused import head_loss
from drafthead.losses.objectives import OBJECTIVES
from tests.losses.problems import random_problem
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
    said = run_ok("-m", "pytest", *cases, "-q", "-p", "no:cacheprovider", **variables)
    assert " passed" in said
    shutil.rmtree(tmp_path)  # 640 MB


@pytest.mark.requires_gpu
@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("size", VOCABULARIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_head_loss_on_cuda_equals_the_function(monkeypatch, objective, size, dtype):
    monkeypatch.setitem(fused.CHUNK_ROWS, "cuda", 500)  # several chunks
    problem = rows, weight, *_ = random_problem(3, 400, hidden=256, vocab=size, dtype=dtype, device="cuda")
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    results = []
    for choice in (objective, {objective: 1.0}):
        scored = head_loss(*problem, choice)  # by the kernels, then by autograd
        results.append((scored, torch.autograd.grad(scored.loss, (rows.states, weight))))
    (ours, our_grads), (wanted, wanted_grads) = results
    torch.testing.assert_close(ours.position_sums, wanted.position_sums, rtol=1e-5, atol=1e-4)
    assert (ours.predictions == wanted.predictions).float().mean() > 0.999  # equal logits may differ in their order
    for grad, wanted_grad in zip(our_grads, wanted_grads, strict=True):
        assert grad.dtype == dtype
        assert (grad - wanted_grad).float().norm() <= tolerance * wanted_grad.float().norm()
