"""vLLM's model runner V2, the default on GPUs, on the CPU build: connector and one pass."""

import pytest

from tests.scripts import run_ok

pytest.importorskip("triton")
pytestmark = pytest.mark.slow


def test_the_connector_and_one_pass_agree_with_transformers():
    plugin = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.gpu.interpreted_triton")
    printed = run_ok(*plugin, "tests/gpu/v2_cases.py", "tests/engine/test_connector.py", timeout_s=900)
    assert " passed" in printed
    assert "skipped" not in printed
