"""Seconds of work on a device, which may go on when a call returns."""

import time
from collections.abc import Callable

import torch


def seconds_of(work: Callable[[], object], device: str, clock: Callable[[], float] = time.perf_counter) -> float:
    """From idle to idle."""
    _wait(device)
    start = clock()
    work()
    _wait(device)
    return clock() - start


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
