"""A process that has imported the large libraries and forks for each command: a start then costs what it does, and not
the five seconds of importing DeepSpeed or vLLM.

python -m tests.warm MODULE ...   reads a command a line from standard input (see `Warm.run`), until its end
"""

import contextlib
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import Any

import torch

from drafthead.config import REPO_ROOT
from tests.scripts import accelerate, environment, free_port, run_here, run_python, settle_heap

TRAINING = ("deepspeed", "accelerate", "drafthead.training.trainer", "drafthead.training.accelerator")
ENGINES = ("vllm", "drafthead.engine.offline", "drafthead.generation.harvest", "drafthead.exporting.export")
_GRACE = 10.0  # seconds in which ranks follow one that failed


class Warm:
    """The process, as seen from here."""

    def __init__(self, modules: tuple[str, ...]):
        self._process: subprocess.Popen | None = None
        if torch.cuda.is_available():  # which a process that has seen a GPU cannot hand to its forks
            return
        # As drafthead sets it before it imports either library on a CPU.
        quiet = {"TORCHDYNAMO_DISABLE": "1", "DS_ACCELERATOR": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm", *modules], cwd=REPO_ROOT, env=environment(**quiet), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def run(self, *arguments: str, ranks: int = 0, timeout_s: float = 1800) -> subprocess.CompletedProcess:
        """Run a script of the checkout to whatever end, with this process's variables as they are now.

        Args:
            arguments: the script and what follows it.
            ranks: processes, with the variables that `accelerate launch` gives them; 0: one without any.
            timeout_s: seconds.
        """
        if self._process is None:
            return run_python(*(accelerate(ranks) if ranks else ()), *arguments, timeout_s=timeout_s)
        with tempfile.TemporaryDirectory() as folder:
            streams = [Path(folder, name) for name in ("out", "err")]
            command = {"arguments": arguments, "ranks": ranks, "streams": list(map(str, streams))}
            self._process.stdin.write(json.dumps(command | {"environment": environment()}) + "\n")
            self._process.stdin.flush()
            try:
                if not select.select([self._process.stdout], [], [], timeout_s)[0]:
                    raise subprocess.TimeoutExpired(arguments, timeout_s)
                code = int(self._process.stdout.readline())
            except BaseException:  # also a test's own time limit: the reply would be taken for the next command's
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._process.pid, signal.SIGKILL)
                warm.cache_clear()
                raise
            return subprocess.CompletedProcess(arguments, code, *(s.read_text(errors="replace") for s in streams))


@cache
def warm(modules: tuple[str, ...]) -> Warm:
    """The process of these modules, one for all tests of a worker."""
    return Warm(modules)


def run_warm(*arguments: str, timeout_s: float = 1800) -> str:
    """Run a script that starts engines and must succeed; returns what it printed."""
    return _succeeded(warm(ENGINES).run(*arguments, timeout_s=timeout_s))


def run_trainer(*overrides: str) -> str:
    """Train as one rank, which must succeed; returns what it printed."""
    return _succeeded(warm(TRAINING).run("train/eagle3.py", *overrides, ranks=1))


def _succeeded(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 0, f"{result.args}\n{result.stdout[-3000:]}\n{result.stderr[-5000:]}"
    return result.stdout


def _become(command: dict[str, Any], rank: int, port: int, modules: Path) -> int:
    """Run the command in this fork, as one of its ranks, and note what was imported; returns the exit code."""
    os.environ.clear()
    os.environ.update(command["environment"])
    if ranks := command["ranks"]:
        # A rank takes its share of the cores as threads: here one, since other tests run beside it.
        threads = {"LOCAL_WORLD_SIZE": str(max(ranks, len(os.sched_getaffinity(0))))}
        os.environ.update(ACCELERATE_MIXED_PRECISION="no", ACCELERATE_DYNAMO_BACKEND="NO", **threads)
    if ranks > 1:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    for number, path in enumerate(["/dev/null", *command["streams"]]):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), number)
    try:
        return run_here(*command["arguments"])
    finally:
        if rank == 0:
            modules.write_text("\n".join(sys.modules))


def import_as_well(modules: Path) -> None:
    """What the last command imported, for all that follow. Not numba: vLLM 0.32 starts no further engine beside it."""
    names = modules.read_text().splitlines() if modules.exists() else []
    for name in names if "numba" not in names else ():
        if name not in sys.modules:
            with contextlib.suppress(Exception):
                importlib.import_module(name)
    settle_heap()


def _ended(children: list[int]) -> int:
    """Wait for all ranks, which do not outlive one that failed for long; returns the first code that is not 0."""
    left, code, deadline = set(children), 0, float("inf")
    while left:
        for pid in list(left):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                left.discard(pid)
                if status and not code:
                    code, deadline = os.waitstatus_to_exitcode(status), time.monotonic() + _GRACE
        if left and time.monotonic() > deadline:
            for pid in left:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return code


def main() -> int:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in sys.argv[1:]:
        importlib.import_module(name)
    settle_heap()
    while line := sys.stdin.readline():
        command, port, children = json.loads(line), free_port(), []
        modules = Path(command["streams"][0]).with_name("modules")
        for rank in range(max(1, command["ranks"])):
            if (pid := os.fork()) == 0:
                return _become(command, rank, port, modules)
            children.append(pid)
        code = _ended(children)
        import_as_well(modules)
        print(code, file=replies, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
