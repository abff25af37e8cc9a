"""Kills a stage at random moments, and looks at what is left each time.

Moments are of three kinds: in the start-up, at a random time; in the work, a random while after a random one of the
names that the stage gives; in the writing, as soon as a random one of its temporary names is seen. Who is hit: the
whole process group, the main process alone (what it started must then go by itself), or one child (a rank, a server,
an engine's process: the main process must then end by itself).
"""

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil

from drafthead.locks import LOCK
from tests.faults.stages import Stage
from tests.scripts import accelerate
from tests.warm import run_warm, warm

Phase = Literal["start-up", "work", "writing"]
Target = Literal["group", "main", "child"]
LOOK_EVERY = 0.004  # seconds: a file of the embedded target is on its way for about as long as that
PATIENCE = 180.0  # seconds for what must end by itself
_HELPERS = ("resource_tracker", "git")  # whose death nobody has to notice


@dataclass(frozen=True)
class Undisturbed:
    """A stage that nobody killed.

    Attributes:
        payload: digest of every file.
        seconds: duration of the run.
        first_name: seconds until the first new name.
        names: new names in all, temporary ones included.
        temporary: number of temporary names among them.
    """

    payload: dict[str, str]
    seconds: float
    first_name: float
    names: int
    temporary: int


@dataclass(frozen=True)
class Hit:
    """A kill.

    Attributes:
        phase: phase of the stage at the kill.
        victim: process that was killed, in words.
        seconds: time from the start of the command to the kill.
        names: number of names that the stage had created by then.
    """

    phase: Phase
    victim: str
    seconds: float
    names: int


class Watch:
    """New names in a stage's folders, looked up all the time."""

    def __init__(self, stage: Stage, root: Path):
        self._stage, self._root = stage, root
        self._known = set(stage.names(root))
        self.started = time.monotonic()
        self.first: float | None = None
        self.new: set[str] = set()

    def look(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # a folder went while it was listed
            self.new |= self._stage.names(self._root) - self._known
        if self.new and self.first is None:
            self.first = time.monotonic() - self.started

    @property
    def temporary(self) -> set[str]:
        return {name for name in self.new if (".tmp" in name or "/." in name) and not name.endswith(LOCK)}

    def until(self, done: Callable[[], bool], alive: Callable[[], bool]) -> None:
        while alive():
            self.look()
            if done():
                return
            time.sleep(LOOK_EVERY)


def run_undisturbed(stage: Stage, root: Path, *overrides: str) -> Undisturbed:
    """Run a stage to its end and measure it."""
    watch, end = Watch(stage, root), threading.Event()
    thread = threading.Thread(target=watch.until, args=(lambda: False, lambda: not end.is_set()))
    thread.start()
    try:
        finish(stage, root, *overrides)
    finally:
        end.set()
        thread.join()
    seconds = time.monotonic() - watch.started
    watch.look()
    first = watch.first or seconds
    return Undisturbed(stage.payload(root), seconds, first, len(watch.new), len(watch.temporary))


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
    stage: Stage, root: Path, usual: Undisturbed, phase: Phase, target: Target, chooser: random.Random, *overrides: str
) -> Hit | None:
    """Start or resume a stage and kill it; None when it was over before. Nothing that it started is left then."""
    with started(stage, root, *overrides) as process:
        watch = Watch(stage, root)
        _wait(watch, phase, usual, chooser, lambda: process.poll() is None)
        family = _family(process)
        if process.poll() is not None:
            assert process.returncode == 0, log_of(stage, root)
            return None
        seconds = time.monotonic() - watch.started
        victim = _strike(process, family, target, chooser)
        watch.look()
        went_on = _still_alive(family)
        assert not went_on, f"{stage.name}: {victim} was killed and these went on: {went_on}"
        if victim.startswith("one child") and process.returncode == 0:
            return None  # it did without
    return Hit(phase, victim, seconds, len(watch.new))


def _wait(watch: Watch, phase: Phase, usual: Undisturbed, chooser: random.Random, alive: Callable[[], bool]) -> None:
    """Until the moment has come."""
    share, number = chooser.random(), chooser.random()
    if phase == "start-up":
        due = watch.started + share * usual.first_name
        watch.until(lambda: time.monotonic() >= due, alive)
        return
    there = len(watch._known)
    if phase == "writing":
        expected = 1 + int(number * max(1, usual.temporary - there // 2))
        watch.until(lambda: len(watch.temporary) >= expected, alive)
        return
    expected = int(number * max(1, usual.names - there))
    watch.until(lambda: len(watch.new) > expected, alive)
    gap = (usual.seconds - usual.first_name) / max(1, usual.names)
    due = time.monotonic() + share * gap
    watch.until(lambda: time.monotonic() >= due, alive)


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
