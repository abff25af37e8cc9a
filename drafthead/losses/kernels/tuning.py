"""Which shapes of a program are tried for a row of logits."""

from typing import Any

import triton

# Elements of a row at a time, warps: 8 to 32 elements per thread.
SHAPES = [(1024, 4), (2048, 4), (2048, 8), (4096, 4), (4096, 8), (8192, 8), (8192, 16), (16384, 16), (32768, 32)]


def tuned(kernel: Any, key: list[str], overwritten: str) -> Any:
    """Pick the fastest shape at the first launch for each key and types of tensors.

    Args:
        kernel: takes `BLOCK`.
        key: arguments whose values the choice depends on.
        overwritten: the argument it writes in place, restored between trials.
    """
    return triton.autotune(
        configs=[triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in SHAPES],
        key=key,
        restore_value=[overwritten],
        cache_results=True,
    )(kernel)
