"""Child processes that end with the process that started them, and the environment they inherit.

A stage that is killed with SIGKILL cannot clean up: a rank would train on beside the resumed run, an engine would keep
its memory, a server its port. On Linux a child can request a signal for its parent's death; elsewhere nothing is done,
and such processes are left to the user.

The signal is SIGKILL: vLLM's engine defers SIGTERM until it has started, which without a parent it never does. The
kernel watches the thread that started the child, so forks of other threads than the main one are left alone.
"""

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

# How OpenMP threads wait for one another. Those that spin for long starve whatever runs beside them; those that sleep
# at once are late for each of a step's thousands of operations. libgomp's look so often, then sleep; others sleep. Read
# when torch is loaded, after this module in every script, and inherited by engines, servers and ranks; what a user has
# set stays.
WAITING = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "3000"}
if not WAITING.keys() & os.environ.keys():
    os.environ.update(WAITING)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_PARENT = "DRAFTHEAD_END_WITH_PARENT"  # process id of the parent


def ends_with_parent() -> Callable[[], None] | None:
    """What `subprocess.Popen` takes as preexec_fn, and a pool of spawned processes as initializer: the child is killed
    when this process dies.

    A pool starts its processes in the thread that submits work, which has to be the main one.
    """
    return partial(_end_with, os.getpid()) if sys.platform == "linux" else None


def _end_with(parent: int) -> None:
    _end_with_parent()
    if os.getppid() != parent:  # it died before the request
        os._exit(1)


def end_with_launcher() -> None:
    """In a rank: end when the launcher that started it is killed, as it does not pass that on.

    A script that somebody started by hand is left alone: closing the terminal must not end it. A launcher that was
    killed before this call, while Python loaded, has left the rank to process 1, whose command names no script of ours.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ or "ACCELERATE_MIXED_PRECISION" in os.environ:
        _end_with_parent()
        with suppress(OSError):  # no /proc, or one that shows only a user's own processes
            first = Path("/proc/1/cmdline").read_text().split("\0")
            ours = [Path(word).name for word in sys.orig_argv if word.endswith(".py")]
            if os.getppid() == 1 and not any(Path(word).name in ours for word in first):
                os._exit(1)


@contextmanager
def children_end_with_us() -> Iterator[None]:
    """Processes that multiprocessing starts while the block runs are killed when this one dies.

    vLLM's engine on CUDA is such a process, forked or spawned, and does not notice its parent's death. A spawned one
    imports this module with its parent's main module (drafthead.cli imports it), a forked one inherits it.
    """
    global _forks_end_with_us
    _forks_end_with_us, os.environ[_PARENT] = True, str(os.getpid())
    try:
        yield
    finally:
        _forks_end_with_us = False
        del os.environ[_PARENT]


def _in_fork() -> None:
    """A child has the thread that forked it, under the same number."""
    if _forks_end_with_us and threading.get_ident() == _MAIN_THREAD:
        _end_with_parent()


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


# A hook of every fork, as Python cannot unregister it.
_forks_end_with_us, _MAIN_THREAD = False, threading.main_thread().ident
os.register_at_fork(after_in_child=_in_fork)
if os.environ.get(_PARENT) == str(os.getppid()):  # spawned
    _end_with_parent()
