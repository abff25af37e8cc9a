"""train.deterministic asks PyTorch for operations that repeat, on CUDA only."""

import os

import pytest
import torch

from drafthead.training import accelerator


@pytest.mark.parametrize("on_gpu", [True, False])
def test_bit_equality_is_asked_for_on_cuda(monkeypatch, on_gpu):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr("torch.cuda.is_available", lambda: on_gpu)
    try:
        accelerator._repeat_to_the_last_bit()
        assert torch.are_deterministic_algorithms_enabled() == on_gpu
        assert ("CUBLAS_WORKSPACE_CONFIG" in os.environ) == on_gpu
    finally:
        torch.use_deterministic_algorithms(False)
