"""Kills a stage at random moments, and looks at what is left each time.

Moments are of two kinds: a random time of the run, and, in the writing, as soon as a temporary name is seen after it.
Who is hit: the whole process group, the main process alone (what it started must then go by itself), or one child (a
rank, a server, an engine's process: the main process must then end by itself).
"""

import contextlib
import os
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from drafthead.locks import LOCK
from tests.faults.stages import Stage
from tests.scripts import accelerate
from tests.warm import run_warm, warm

Phase = Literal["work", "writing"]
Target = Literal["group", "main", "child"]
LOOK_EVERY = 0.004  # seconds: a file of the embedded target is on its way for about as long as that
PATIENCE = 180.0  # seconds for what must end by itself
_HELPERS = ("resource_tracker", "git")  # whose death nobody has to notice


@dataclass(frozen=True)
class Hit:
    """A kill.

    Attributes:
        victim: who, in words.
        seconds: from the start of the command to the kill.
    """

    victim: str
    seconds: float


def finish(stage: Stage, root: Path, *overrides: str) -> float:
    """Run a stage, which must succeed; returns seconds."""
    began = time.monotonic()
    run_warm(*stage.arguments(root, *overrides), ranks=stage.ranks)
    return time.monotonic() - began


@contextlib.contextmanager
def started(stage: Stage, root: Path, *overrides: str) -> Iterator[psutil.Popen]:
    """A stage in a process group of its own. Whatever happens, nothing of it is left when the block ends."""
    launcher = accelerate(stage.ranks) if stage.ranks else ()
    process = warm().start(*launcher, *stage.arguments(root, *overrides), log=root / f"{stage.name}.log")
    try:
        yield process
    finally:
        if process.poll() is None:
            _end(_family(process))
            process.wait()


def log_of(stage: Stage, root: Path) -> str:
    """The end of what the last run of a stage said."""
    return f"{stage.name}: ..." + (root / f"{stage.name}.log").read_text(errors="replace")[-4000:]


def kill_once(
    stage: Stage, root: Path, seconds: float, phase: Phase, target: Target, chooser: random.Random, *overrides: str
) -> Hit | None:
    """Start or resume a stage, which takes so many seconds, and kill it; None when it was over before. Nothing that it
    started is left then.
    """
    began = time.monotonic()
    with started(stage, root, *overrides) as process:
        due = began + chooser.uniform(0, 0.9 * seconds)
        while process.poll() is None and time.monotonic() < due:
            time.sleep(LOOK_EVERY)
        before = _temporary(stage, root)
        while phase == "writing" and process.poll() is None and _temporary(stage, root) <= before:
            time.sleep(LOOK_EVERY)
        family = _family(process)
        if process.poll() is not None:
            assert process.returncode == 0, log_of(stage, root)
            return None
        hit = Hit(_strike(process, family, target, chooser), time.monotonic() - began)
        went_on = _still_alive(family)
        assert not went_on, f"{stage.name}: {hit.victim} was killed and these went on: {went_on}"
        if hit.victim.startswith("one child") and process.returncode == 0:
            return None  # it did without
    return hit


def _temporary(stage: Stage, root: Path) -> set[str]:
    """Names of files that are being written."""
    with contextlib.suppress(FileNotFoundError):  # a folder went while it was listed
        return {n for n in stage.names(root) if (".tmp" in n or "/." in n) and not n.endswith(LOCK)}
    return set()


def _family(process: psutil.Popen) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return [process]


def _still_alive(family: list[psutil.Process]) -> list[str]:
    """What has not ended by itself, which is ended then. One that nobody has reaped has ended."""
    _, alive = psutil.wait_procs(family, timeout=PATIENCE)
    alive = [process for process in alive if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    names = [_named(process) for process in alive]
    _end(alive)
    return names


def _end(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _strike(process: psutil.Popen, family: list[psutil.Process], target: Target, chooser: random.Random) -> str:
    """Send SIGKILL; returns who got it."""
    children = [child for child in family[1:] if not any(name in _named(child) for name in _HELPERS)]
    if target == "child" and children:
        child = chooser.choice(children)
        name = _named(child)
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
        return f"one child ({name})"
    if target == "group":
        os.killpg(process.pid, signal.SIGKILL)
        return "its process group"
    process.kill()
    return f"the main process alone, of {len(family)}" if children else "its only process"


def _named(process: psutil.Process) -> str:
    """What a process is, in a word or two."""
    try:
        command = " ".join(process.cmdline())
    except psutil.Error:
        return "gone"
    known = {
        "api_server": "server", "EngineCore": "engine core", "train/eagle3.py": "rank",
        "resource_tracker": "resource_tracker", "spawn_main": "worker",
    }  # fmt: skip
    return next((word for part, word in known.items() if part in command), Path(command.split(" ")[-1]).name[:40])
