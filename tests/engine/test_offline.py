"""The repaired kernel, called the way vLLM's rejection sampler calls it, and a cache that is not reset at once."""

from types import SimpleNamespace

import pytest
import torch

from drafthead.engine.generate import Engine
from drafthead.engine.offline import on_cpu, repair_cpu_build


@pytest.mark.slow
def test_vllm_divides_every_draft_position_by_its_requests_temperature():
    if not on_cpu():
        pytest.skip("the CPU build's kernels are not used here")
    from vllm.platforms import current_platform
    from vllm.v1.sample.rejection_sampler import expand_batch_to_tokens

    repair_cpu_build()
    current_platform.register_triton_kernel_overrides()
    # the second request has no draft, the third is greedy: divided by one
    expanded = expand_batch_to_tokens(torch.tensor([0.7, 0.3, 0.0]), torch.tensor([2, 2, 4]), 4, 0, 1)
    assert expanded.tolist() == pytest.approx([0.7, 0.7, 1.0, 1.0])


def test_the_prefix_cache_is_reset_until_nothing_holds_it():
    results = iter([False, True])
    Engine(SimpleNamespace(reset_prefix_cache=lambda: next(results))).reset_cache()
    assert next(results, None) is None
