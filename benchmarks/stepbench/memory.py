"""How much memory a stretch of code needs beyond what the process held before it.

On a GPU the allocator counts. On the CPU it is resident memory: Linux keeps its high-water mark (VmHWM),
and writing 5 to /proc/self/clear_refs sets the mark back to the present. Where that is not permitted a
thread samples instead, which can miss a peak shorter than a millisecond.

Freed memory is handed back to the system first. Otherwise what a contestant freed while loading would be
used again inside the stretch and never be counted.
"""

import ctypes
import gc
import re
import threading
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


class PeakMemory:
    """Context manager; afterwards `before`, `peak` (bytes) and `how` (the method) are set."""

    def __init__(self, device: str):
        self.device = device
        self.before = self.peak = 0
        self.how = ""

    def __enter__(self) -> "PeakMemory":
        gc.collect()
        if self.device == "cuda":
            self.how = "torch.cuda.max_memory_allocated"
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
            return self
        _trim()
        self.how = "VmHWM" if _reset_mark() else "sampled VmRSS"
        self._sampler = None if self.how == "VmHWM" else _Sampler()
        self.before = _status("VmRSS")
        return self

    def __exit__(self, *_error: object) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()
            self.peak = torch.cuda.max_memory_allocated()
        else:
            self.peak = self._sampler.stop() if self._sampler else _status("VmHWM")

    @property
    def needed(self) -> int:
        """Bytes beyond `before`."""
        return self.peak - self.before


def _status(field: str) -> int:
    match = re.search(rf"^{field}:\s+(\d+) kB", _STATUS.read_text(), re.MULTILINE)
    assert match, f"/proc/self/status has no {field}: this needs Linux"
    return int(match[1]) * 1024


def _trim() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc only
    if trim:
        trim(0)


def _reset_mark() -> bool:
    try:
        _CLEAR.write_text("5")
    except OSError:
        return False
    return _status("VmHWM") < _status("VmRSS") + 2**24  # some sandboxes accept the write and ignore it


class _Sampler:
    def __init__(self) -> None:
        self._done = threading.Event()
        self._highest = 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._done.wait(0.0005):
            self._highest = max(self._highest, _status("VmRSS"))

    def stop(self) -> int:
        self._done.set()
        self._thread.join()
        return max(self._highest, _status("VmRSS"))
