"""Faults of the pinned vLLM that this project works around; each test fails once its fault is gone."""

import pytest
import torch

from drafthead.serving.engine import import_vllm, on_cpu


@pytest.mark.slow
def test_speculation_on_cpu_samples_at_no_temperature_in_particular():
    """Why answers and states are not made in one pass: the states come through the speculative path.

    The temperatures of a batch are spread over its draft tokens into a float tensor, but the CPU kernel writes into
    an int64 copy of it: what the logits are divided by is memory that nobody has written.
    """
    import_vllm()
    if not on_cpu():
        pytest.skip("only the CPU build has this kernel")
    from vllm.platforms import current_platform
    from vllm.utils.cpu_triton_utils import _expand_kernel_impl

    current_platform.import_kernels()
    temperatures = torch.full((3,), float("nan"))
    _expand_kernel_impl(temperatures, torch.tensor([0.7, 0.9]), torch.tensor([2, 3], dtype=torch.int32), 0, 1)
    assert temperatures.isnan().all(), f"wanted 0.7 0.7 0.9 and got {temperatures}: look at docs/responses.md again"
