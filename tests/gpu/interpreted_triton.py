"""A pytest plugin: vLLM's model runner V2, the default on GPUs, on the CPU build, with its Triton kernels interpreted.

    python -m pytest -p tests.gpu.interpreted_triton tests/engine/test_connector.py

vLLM takes V2 where Triton works; a stand-in backend named "cpu" makes it look so. CUDA graphs are not covered.
"""

import os
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"
os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"

import triton.backends

triton.backends.backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True), compiler=None)
