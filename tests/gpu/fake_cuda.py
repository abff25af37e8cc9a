"""Fake CUDA tensors on a machine without a GPU, and what a GPU would have done with them.

A fake tensor has a shape, a type and a device, and no values. Importing this module, before torch, compiles and loads a
device that does nothing, on which autograd runs over fake tensors of "cuda:0"; under `Counter` every operation is
counted: launches, bytes, floating-point operations, live memory, and where the host would wait for the device. What
this cannot see: kernels, races, real speed.
"""

import collections
import ctypes
import subprocess
import sys
import tempfile
import traceback
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_SOURCE = Path(__file__).with_name("fake_device.cpp")


def _load_device() -> None:
    """PyTorch looks for its hooks once, when it is imported."""
    assert "torch" not in sys.modules
    home = Path(find_spec("torch").origin).parent  # type: ignore[union-attr, arg-type]
    with tempfile.TemporaryDirectory() as folder:
        built = f"{folder}/fake_device.so"
        subprocess.run(
            ["g++", "-std=c++20", "-shared", "-fPIC", "-O0", f"-I{home}/include", str(_SOURCE), f"-L{home}/lib",
             f"-Wl,-rpath,{home}/lib", "-ltorch_cpu", "-lc10", "-o", built],
            check=True,
        )  # fmt: skip
        ctypes.CDLL(built)


_load_device()

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensor  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402

from drafthead.config import REPO_ROOT  # noqa: E402


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _never(*_: Any) -> None:
    raise AssertionError("fake tensors reach no kernel")


# One kernel on CUDA; a build without CUDA would take it apart before it is counted.
_LIBRARY = torch.library.Library("aten", "IMPL")
_LIBRARY.impl("silu_backward", _never, "CUDA")
_LIBRARY.impl("record_stream", lambda tensor, stream: None, "Meta")

# Allocations and views: no kernel is launched.
_FREE = {
    "detach", "empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "lift_fresh", "_unsafe_view",
    "record_stream",
}  # fmt: skip
# The host needs the value or the size of a result on the device.
_WAITS = {"_local_scalar_dense", "nonzero", "_unique2", "unique_consecutive", "unique_dim", "masked_select", "equal"}
_SECONDS_PER_BYTE = 1 / (0.85 * 3.35e12)  # H100 SXM, 85 % of its bandwidth
_SECONDS_PER_LAUNCH = 4e-6
_RATES = {"product": 700e12, "flash_forward": 330e12, "flash_backward": 280e12}  # operations/s, of an H100


class Counter(TorchDispatchMode):
    """Counts what is dispatched on fake CUDA tensors while it is entered.

    Args:
        documents: (queries, keys) of each document, which flash attention's work depends on.

    Attributes:
        launches, moved, operations, seconds: kernels, bytes, floating-point operations, modelled seconds on an H100.
        live, peak: bytes of storages made meanwhile.
        waits: "file:function operation" -> how often the host waited there.
        sent: "beside" or "between" the kernels -> copies from the host, on a stream of their own or on the kernels';
            the others count no copy that runs beside the kernels.
    """

    def __init__(self, documents: list[tuple[int, int]]):
        super().__init__()
        self._pairs = sum(rows * keys - rows * (rows - 1) / 2 for rows, keys in documents)
        self._storages: Any = weakref.WeakSet()
        self.launches, self.moved, self.operations, self.seconds = 0, 0, 0.0, 0.0
        self.live = self.peak = 0
        self.waits: collections.Counter[str] = collections.Counter()
        self.sent: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.name().removeprefix("aten::").split(".")[0]
        self._note_wait(func, name, args, kwargs)
        if name == "_local_scalar_dense" and isinstance(args[0], FakeTensor):
            # A fake tensor has no value: what is asked (is all of it finite?) is so.
            return True if args[0].dtype == torch.bool else 0.0 if args[0].dtype.is_floating_point else 0
        results = func(*args, **kwargs)
        read, made = map(_tensors, ((args, kwargs), results))
        for tensor in made:
            self._track(tensor)
        on_device = any(t.is_cuda for t in (*read, *made))
        if on_device and not func.is_view and name not in _FREE and not name.startswith("prim"):
            beside = torch.accelerator.current_stream(0).stream_id != 0
            if name in ("_to_copy", "copy_") and not all(t.is_cuda for t in read):
                self.sent["beside" if beside else "between"] += 1
            if not beside:
                self._add(name, args, read, made)
        return results

    def kernel(self, moved: int, operations: float = 0.0, rate: float = _RATES["product"]) -> None:
        """Count a kernel: bytes moved, floating-point operations, and how many of these a second it does."""
        self.launches, self.moved, self.operations = self.launches + 1, self.moved + moved, self.operations + operations
        self.seconds += max(operations / rate, moved * _SECONDS_PER_BYTE, _SECONDS_PER_LAUNCH)

    def _add(self, name: str, args: tuple, read: list[torch.Tensor], made: list[torch.Tensor]) -> None:
        moved_in, moved_out = (sum(t.nbytes for t in tensors if t.is_cuda) for tensors in (read, made))
        if name in ("index", "embedding", "index_select", "gather"):  # of what is indexed, only the rows taken
            moved_in = 2 * moved_out
        elif name in ("index_put", "index_put_", "_index_put_impl_"):
            moved_in, moved_out = 2 * args[2].nbytes, 0
        elif name == "copy_":
            moved_in, moved_out = args[1].nbytes, args[0].nbytes
        self.kernel(moved_in + moved_out, *self._work(name, args))

    def _work(self, name: str, args: tuple) -> tuple[float, float]:
        """Floating-point operations of matrix products and attention, and their rate; none of what bandwidth bounds."""
        if name in ("mm", "bmm", "addmm", "addmm_"):
            left, right = args[1:3] if name.startswith("add") else args[:2]
            return 2 * left.numel() * right.shape[-1], _RATES["product"]
        if name.startswith("_flash_attention"):
            forward = name.endswith("forward")
            query = args[0] if forward else args[1]
            once = 4 * query.shape[1] * query.shape[2] * self._pairs
            return (once, _RATES["flash_forward"]) if forward else (2.5 * once, _RATES["flash_backward"])
        return 0.0, _RATES["product"]

    def _note_wait(self, func: Any, name: str, args: tuple, kwargs: dict) -> None:
        source = next((a for a in args if isinstance(a, torch.Tensor)), None)
        if source is None:
            return
        waits = name in _WAITS or func.name() == "aten::repeat_interleave.Tensor"
        waits = waits and source.is_cuda
        if name == "_to_copy" and not kwargs.get("non_blocking"):
            to = torch.device(kwargs.get("device") or source.device)
            waits = to.type != source.device.type
        if name == "copy_" and not (args[2:] or [kwargs.get("non_blocking")])[0]:
            waits = args[1].device.type != source.device.type
        if waits:
            frames = [f for f in traceback.extract_stack() if f.filename.startswith(f"{REPO_ROOT}/drafthead/")]
            place = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "elsewhere"
            self.waits[f"{place} {name}"] += 1

    def _track(self, tensor: torch.Tensor) -> None:
        if not isinstance(tensor, FakeTensor) or not tensor.is_cuda:
            return
        storage = tensor.untyped_storage()
        if storage in self._storages:
            return
        self._storages.add(storage)
        size = storage.nbytes()
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.live -= size
