"""The Triton kernels compiled ahead of time for GPUs that are not there, without a register spilled."""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
WRITTEN = ("forward_kl", "total_variation", "lk_hybrid")  # not imported: that would import Triton before its tests


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """Local memory of a thread, as the toolkit that Triton brings along reads it."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    printed = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", printed)[1])


def compiled(kernel, capability: int, **constants) -> bytes:
    """A kernel as it is launched at a draft vocabulary of 32,000: sizes and pointers are multiples of 16."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from drafthead.losses.kernels import BLOCK, WARPS

    constants = {name: value for name, value in {**constants, "BLOCK": BLOCK}.items() if name in kernel.arg_names}
    types = {"grad": "*bf16", "met": "*i64", "best_out": "*i64", "size": "i32"}
    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name not in constants}
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": WARPS}).asm["cubin"]


@pytest.mark.parametrize("objective", WRITTEN)
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_compile_and_keep_their_registers(tmp_path, monkeypatch, objective, capability):
    from drafthead.losses.kernels import score_kernel, target_kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    constants = {"OBJECTIVE": objective, "NEEDS_GRAD": True, "LK_RATE": 3.0}
    for kernel in (score_kernel, target_kernel):
        assert stack_bytes(compiled(kernel, capability, **constants), tmp_path) == 0, kernel.__name__
