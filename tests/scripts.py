"""Python in processes of its own: the project's scripts as a user starts them, and pieces of code."""

import contextlib
import gc
import logging
import os
import random
import runpy
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from drafthead.config import REPO_ROOT


def environment(**more: str) -> dict[str, str]:
    """What a child process gets: this one's variables as they are now, the checkout to import from, `more`.

    One thread each unless OMP_NUM_THREADS is set: OpenMP threads that spin for one another would starve whatever runs
    beside them. An engine's cache in large pages: 0.1 s of CPU to clear it, and not 0.8.
    """
    settings = {
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"), "OMP_WAIT_POLICY": "PASSIVE",
        "WANDB_MODE": "offline", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }  # fmt: skip
    return {**os.environ, **settings, "PYTHONPATH": str(REPO_ROOT), **more}


def accelerate(ranks: int = 1) -> tuple[str, ...]:
    """Arguments that put accelerate's launcher before a script, with nothing left for it to ask."""
    several = ("--multi_gpu",) if ranks > 1 else ()
    return (
        "-m", "accelerate.commands.launch", *several, "--num_processes", str(ranks), "--num_machines", "1",
        "--mixed_precision", "no", "--dynamo_backend", "no",
    )  # fmt: skip


def start(*arguments: str, variables: Mapping[str, str] = {}, **options: Any) -> subprocess.Popen:
    """Begin to run this interpreter in the checkout."""
    return subprocess.Popen([sys.executable, *arguments], cwd=REPO_ROOT, env=environment(**variables), **options)


def wait_for(happened: Callable[[], Any], log: Path, *processes: subprocess.Popen | psutil.Popen) -> None:
    """Until something has happened.

    Args:
        happened: condition that is polled.
        log: output file of a process, or a pattern of such names.
        processes: processes that must not end before.
    """
    deadline = time.monotonic() + 600
    while not happened():
        for process in processes:
            assert time.monotonic() < deadline
            assert process.poll() is None, "\n".join(p.read_text()[-3000:] for p in log.parent.glob(log.name))
        time.sleep(0.02)


def run_python(*arguments: str, timeout_s: float = 1800, **variables: str) -> subprocess.CompletedProcess:
    """Run this interpreter in the checkout, to whatever end.

    Args:
        arguments: a script below the checkout, or what else Python takes, and what follows it.
        timeout_s: seconds to wait.
        variables: variables of the environment.
    """
    return subprocess.run(
        [sys.executable, *arguments], cwd=REPO_ROOT, capture_output=True, text=True, check=False, timeout=timeout_s,
        env=environment(**variables),
    )  # fmt: skip


def run_ok(*arguments: str, timeout_s: float = 1800, **variables: str) -> str:
    """Run what must succeed; returns what it printed."""
    result = run_python(*arguments, timeout_s=timeout_s, **variables)
    assert result.returncode == 0, f"{arguments}\n{result.stdout[-3000:]}\n{result.stderr[-5000:]}"
    return result.stdout


def run_here(script: str, *arguments: str) -> int:
    """Run a script in this process, where torch is loaded already; returns what it ends with. Never what starts n-gram
    drafting, which leaves a process unable to start a further engine.
    """
    before, folders = sys.argv, sys.path[:]
    sys.argv = [script, *arguments]
    sys.path.insert(0, str((REPO_ROOT / script).parent))  # as Python does for a script
    try:
        with contextlib.chdir(REPO_ROOT):
            runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    finally:
        sys.argv, sys.path[:] = before, folders
        forget_status_lines()
    return 0


def forget_status_lines() -> None:
    """Undo what `run_recipe` does to the project's logger: it counts on its process to end."""
    logger = logging.getLogger("drafthead")
    logger.handlers, logger.propagate = [], True
    logger.setLevel(logging.NOTSET)


_freeze = gc.freeze


def settle_heap() -> None:
    """Take all objects there are out of the garbage collector's sight: what the libraries made at their import.

    vLLM collects seven times for each engine, a third of what its start takes otherwise. Its own freezing and
    unfreezing, which would undo this, does nothing from here on.
    """
    gc.collect()
    _freeze()
    gc.freeze = gc.unfreeze = lambda: None


def free_port() -> int:
    """A port of this machine that nobody listens on, none of those that Linux gives to outgoing connections."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
