"""The Triton kernels compiled ahead of time for GPUs that are not there, without a register spilled."""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")


def stack_bytes(cubin: bytes, folder: Path) -> int:
    """Local memory of a thread, as the toolkit that Triton brings along reads it."""
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    printed = subprocess.run([tool, "-res-usage", path], capture_output=True, text=True, check=True).stdout
    return int(re.search(r"STACK:(\d+)", printed)[1])


def compiled(kernel, capability: int, warps: int, types: dict, **constants) -> bytes:
    """A kernel as it is launched: sizes and pointers are multiples of 16. Of what `types` leaves out, float32."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in kernel.arg_names}
    places = []
    for i, kind in enumerate(signature.values()):
        places += [(i, j) for j in range(len(kind))] if isinstance(kind, tuple) else [(i,)]
    aligned = {place: [["tt.divisibility", 16]] for place in places if signature[kernel.arg_names[place[0]]] not in
               ("constexpr", "fp32")}  # fmt: skip
    source = ASTSource(kernel, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": warps}).asm["cubin"]


@pytest.fixture(autouse=True)
def compile_anew(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", ["target_kernel", "score_kernel"])
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_kernels_of_the_loss_compile_and_keep_their_registers(tmp_path, name, capability):
    """At a draft vocabulary of 32,000."""
    from drafthead.losses import kernels

    types = {"grad": "*bf16", "met": "*i64", "best_out": "*i64", "size": "i32"}
    constants = {"BLOCK": kernels.BLOCK} | ({"NEEDS_GRAD": True} if name == "score_kernel" else {})
    code = compiled(getattr(kernels, name), capability, kernels.WARPS, types, **constants)
    assert stack_bytes(code, tmp_path) == 0


@pytest.mark.parametrize("capability", [90, 100])
def test_kernels_of_the_block_compile_and_keep_their_registers(tmp_path, capability):
    """At gpt-oss-120b's sizes, the norm of its three aux layers included, with the six pairs of the last TTT step."""
    from drafthead.drafters import kernels

    names = (
        "states", "weight", "out", "grad", "gate", "up", "grad_states", "grad_gate", "grad_up", "query", "grad_out",
    )  # fmt: skip
    types = dict.fromkeys((*names, "block_out", "grad_query"), "*bf16")
    types |= dict.fromkeys(("size", "rows", "heads", "half", "groups", "per_group", "dim"), "i32")
    types |= dict.fromkeys(("eps", "scale"), "fp32")
    pairs = dict.fromkeys(("keys", "values", "grad_keys", "grad_values"), ("*bf16",) * 6)
    scales = {"scale": "*fp32"}
    cases = [
        (kernels.gated_kernel, 4, {}, {"BLOCK": kernels._BLOCK}),
        (kernels.gated_backward_kernel, 4, {}, {"BLOCK": kernels._BLOCK}),
        (kernels.rotate_kernel, 4, {}, {"BACK": True, "HEADS": 64, "HALF": 32}),
        (kernels.merge_kernel, 1, pairs, {"PER_GROUP": 8, "DIM": 64}),
        (kernels.merge_backward_kernel, 1, pairs, {"PER_GROUP": 8, "DIM": 64}),
    ]
    for size, needs_states in ((2880, True), (3 * 2880, False)):
        shape = kernels.launch_shape(size)
        warps = shape.pop("num_warps")
        cases.append((kernels.norm_kernel, warps, scales, shape))
        cases.append((kernels.norm_backward_kernel, warps, scales, {**shape, "NEEDS_STATES": needs_states}))
    for kernel, warps, more, constants in cases:
        assert stack_bytes(compiled(kernel, capability, warps, types | more, **constants), tmp_path) == 0, (
            kernel.__name__
        )
