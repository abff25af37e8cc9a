"""The repaired kernel, called the way vLLM's rejection sampler calls it."""

import pytest
import torch

from drafthead.serving.cpu_build import expand, repair_cpu_build
from drafthead.serving.engine import on_cpu


def test_every_token_gets_its_requests_value():
    output = torch.full((4,), -7.0)
    expand(output, torch.tensor([0.7, 0.0, 0.3]), torch.tensor([2, 2, 4]), 0, 1)  # the second request has no draft
    assert output.tolist() == pytest.approx([0.7, 0.7, 0.3, 0.3])
    expand(output, torch.tensor([0.0, 0.5]), torch.tensor([1, 4]), 0, 1)  # greedy among sampled: divided by one
    assert output.tolist() == [1.0, 0.5, 0.5, 0.5]


@pytest.mark.slow
def test_vllm_divides_every_draft_position_by_its_requests_temperature():
    if not on_cpu():
        pytest.skip("the CPU build's kernels are not used here")
    from vllm.platforms import current_platform
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    repair_cpu_build()
    current_platform.register_triton_kernel_overrides()
    expanded = expand_batch_to_tokens(torch.tensor([0.7, 0.3]), torch.tensor([1, 3]), 3, 0, 1)
    assert expanded.tolist() == pytest.approx([0.7, 0.3, 0.3])
