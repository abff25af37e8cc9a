"""vLLM's model runner V2, the default on GPUs, on the CPU build: connector and one pass."""

import pytest

from tests.scripts import run_ok

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.long]


@pytest.mark.parametrize("cases", ["tests/gpu/v2_cases.py", "tests/engine/test_connector.py"])
def test_states_agree_with_transformers(cases):
    """Each in a process of its own: in the second engine of one vLLM asks for an accelerator, which a CPU is not."""
    plugin = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.gpu.interpreted_triton")
    printed = run_ok(*plugin, cases, timeout_s=900)
    assert " passed" in printed
    assert "skipped" not in printed
