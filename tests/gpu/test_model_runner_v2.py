"""vLLM's model runner V2, the default on GPUs, on the CPU build: the connector."""

import pytest

from tests.scripts import run_ok

pytest.importorskip("triton")
pytestmark = [pytest.mark.slow, pytest.mark.long]


def test_states_agree_with_transformers():
    """In a process of its own: in the second engine of one vLLM asks for an accelerator, which a CPU is not."""
    plugin = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.gpu.interpreted_triton")
    printed = run_ok(*plugin, "tests/engine/test_connector.py", timeout_s=900)
    assert " passed" in printed
    assert "skipped" not in printed
