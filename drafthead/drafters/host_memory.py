"""Freed memory, back to the system.

torch allocates CPU tensors aligned to 64 bytes, and glibc before 2.38 cannot place such a request into a
hole of exactly its size. So temporaries of the unrolled steps leave holes that nothing fills, which the
process keeps: half a gigabyte at 2,048 tokens and 7 steps. Handing them back takes milliseconds. A GPU's
allocator has no such holes.
"""

import ctypes

from torch import Tensor

_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
_WORTH_IT = 4 * 2**20  # bytes; the holes that smaller states leave are not worth fetching pages again


def give_back(state: Tensor) -> None:
    """Hand back what was freed while states of this size were computed.

    Does nothing for small states, on a GPU, or without glibc.
    """
    if state.device.type == "cpu" and _trim is not None and state.nbytes >= _WORTH_IT:
        _trim(0)
