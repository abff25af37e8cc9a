"""Faults of the pinned vLLM that this project works around; each test fails once its fault is gone."""

import importlib.util

import pytest
import torch

from drafthead.serving.engine import import_vllm, on_cpu


@pytest.mark.slow
def test_speculation_on_cpu_samples_at_no_temperature_in_particular():
    """The temperatures of a batch are spread over its draft tokens into a float tensor, but the CPU kernel writes into
    an int64 copy of it: what the logits are divided by is memory that nobody has written.
    """
    import_vllm()
    if not on_cpu():
        pytest.skip("only the CPU build has this kernel")
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    as_shipped = _fresh_copy("vllm.utils.cpu_triton_utils")  # the one in use has been repaired
    temperatures = torch.full((3,), float("nan"))
    ends = torch.tensor([2, 3], dtype=torch.int32)
    as_shipped._expand_kernel_impl(temperatures, torch.tensor([0.7, 0.9]), ends, 0, 1)
    assert temperatures.isnan().all(), f"wanted 0.7 0.7 0.9, got {temperatures}: drafthead/serving/cpu_build.py can go"


def _fresh_copy(name: str):
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
