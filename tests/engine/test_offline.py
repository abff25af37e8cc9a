"""The repaired kernel, called the way vLLM's rejection sampler calls it, and a cache that is not reset at once."""

import importlib.util
from types import SimpleNamespace

import pytest
import torch

from drafthead.engine.generate import Engine
from drafthead.engine.offline import import_vllm, on_cpu, repair_cpu_build


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


@pytest.mark.slow
def test_vllm_as_shipped_samples_at_no_temperature_in_particular():
    """Fails once the fault that is worked around is gone.

    The temperatures of a batch are spread over its draft tokens into a float tensor, but the CPU kernel writes into an
    int64 copy of it: what the logits are divided by is memory that nobody has written.
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
    assert temperatures.isnan().all(), f"wanted 0.7 0.7 0.9, got {temperatures}: repair_cpu_build can go"


def test_the_prefix_cache_is_reset_until_nothing_holds_it():
    results = iter([False, True])
    Engine(SimpleNamespace(reset_prefix_cache=lambda: next(results))).reset_cache()
    assert next(results, None) is None


def _fresh_copy(name: str):
    spec = importlib.util.find_spec(name)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
