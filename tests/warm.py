"""A process that has imported the large libraries and forks for each command: a start then costs what it does, and not
the seconds of importing DeepSpeed (5) or vLLM (20). What the command starts itself is a fork, too.

python -m tests.warm   reads a command a line from standard input (see `Warm.run`), until its end
"""

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch

from drafthead.config import REPO_ROOT
from drafthead.processes import ends_with_parent
from tests.scripts import accelerate, environment, free_port, run_here, run_python, settle_heap

LIBRARIES = (
    "accelerate.commands.launch", "datasets", "deepspeed", "drafthead.evaluation.decision.analysis",
    "drafthead.evaluation.reporting.report", "drafthead.exporting.export", "drafthead.generation.harvest",
    "drafthead.training.accelerator", "drafthead.training.trainer", "vllm.entrypoints.openai.api_server",
    "vllm.entrypoints.llm", "vllm.v1.worker.cpu_worker",
)  # fmt: skip
# As drafthead sets it before it imports these on a CPU.
QUIET = {"TORCHDYNAMO_DISABLE": "1", "DS_ACCELERATOR": "cpu", "VLLM_LOGGING_LEVEL": "ERROR"}
_MODULES = ("drafthead.engine.api_server", "accelerate.commands.launch")  # that stages start
_GRACE = 10.0  # seconds in which ranks follow one that failed


class Warm:
    """The process, as seen from here."""

    def __init__(self) -> None:
        self._process: subprocess.Popen | None = None
        if torch.cuda.is_available():  # which a process that has seen a GPU cannot hand to its forks
            return
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm"], cwd=REPO_ROOT, env=environment(**QUIET), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip

    def run(self, *arguments: str, ranks: int = 0, timeout_s: float = 1800) -> subprocess.CompletedProcess:
        """Run a script of the checkout to whatever end, with this process's variables as they are now.

        Args:
            arguments: script and its arguments.
            ranks: processes, with the variables that `accelerate launch` gives them; 0: one without any.
            timeout_s: seconds to wait.
        """
        if self._process is None:
            return run_python(*(accelerate(ranks) if ranks else ()), *arguments, timeout_s=timeout_s)
        with tempfile.TemporaryDirectory() as folder:
            streams = [Path(folder, name) for name in ("out", "err")]
            command = {"arguments": arguments, "ranks": ranks, "streams": list(map(str, streams))}
            code = self._ask(timeout_s, command | {"variables": environment()})
            return subprocess.CompletedProcess(arguments, code, *(s.read_text(errors="replace") for s in streams))

    def start(self, *arguments: str, log: Path) -> psutil.Popen:
        """Begin to run a command in a session of its own, output and errors to `log`.

        Args:
            arguments: what follows the interpreter: a script of the checkout, or accelerate's launcher and one.
            log: output file, which is replaced.
        """
        if self._process is None:
            with log.open("w") as file:
                return psutil.Popen(
                    [sys.executable, *arguments], cwd=REPO_ROOT, env=environment(), start_new_session=True,
                    stdin=subprocess.DEVNULL, stdout=file, stderr=file,
                )  # fmt: skip
        return Started(self, self._ask(60, {"arguments": arguments, "log": str(log), "variables": environment()}))

    def _ask(self, timeout_s: float, command: dict[str, Any]) -> Any:
        assert self._process is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        try:
            if not select.select([self._process.stdout], [], [], timeout_s)[0]:
                raise subprocess.TimeoutExpired(command["arguments"], timeout_s)
            return json.loads(self._process.stdout.readline())
        except BaseException:  # also a test's own time limit: the reply would be taken for the next command's
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            warm.cache_clear()
            raise


class Started(psutil.Process):
    """A command that goes on, of which the process above knows how it ends; otherwise as psutil.Popen."""

    def __init__(self, warm: Warm, pid: int):
        super().__init__(pid)
        self._warm, self.returncode = warm, None

    def poll(self) -> int | None:
        """The exit code, None while it runs."""
        if self.returncode is None:
            self.returncode = self._warm._ask(60, {"arguments": "poll", "pid": self.pid})
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code, once it has ended."""
        deadline = time.monotonic() + (float("inf") if timeout is None else timeout)
        while self.poll() is None:
            if time.monotonic() > deadline:
                raise psutil.TimeoutExpired(timeout, self.pid)
            time.sleep(0.02)
        return self.returncode


@cache
def warm() -> Warm:
    """One for all tests of a worker."""
    return Warm()


def run_warm(*arguments: str, ranks: int = 0, timeout_s: float = 1800) -> str:
    """Run a script that must succeed, as in `Warm.run`; returns what it printed."""
    result = warm().run(*arguments, ranks=ranks, timeout_s=timeout_s)
    assert result.returncode == 0, f"{result.args}\n{result.stdout[-3000:]}\n{result.stderr[-5000:]}"
    return result.stdout


def run_trainer(*overrides: str) -> str:
    """Train as one rank, which must succeed; returns what it printed."""
    return run_warm("train/eagle3.py", *overrides, ranks=1)


class Fork(subprocess.Popen):
    """A script of the checkout, a server or a launcher, in a fork of this process instead of a new interpreter."""

    def _execute_child(self, args: Any, executable: Any, before: Any, *rest: Any) -> None:
        words = [str(word) for word in args] if isinstance(args, list) else []
        words[1:2] = [word for word in words[1:2] if word != "-u"]
        name = words[2] if words[1:2] == ["-m"] else words[1] if words[1:] else ""
        script = REPO_ROOT / name
        if words[:1] != [sys.executable] or not (
            name in _MODULES or (script.suffix == ".py" and script.is_relative_to(REPO_ROOT))
        ):
            super()._execute_child(args, executable, before, *rest)
            return
        variables, (stdin, _, _, stdout, _, stderr), session = rest[3], rest[7:13], rest[18]
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._child_created, self.pid = True, os.fork()
        if self.pid:
            self._close_pipe_fds(*rest[7:13])
            return
        code = 1
        try:
            from setproctitle import setproctitle

            setproctitle(" ".join(words))
            if session:
                os.setsid()
            if before is not None:
                before()
            for number, stream in enumerate((stdin, stdout, stderr)):
                if stream >= 0:
                    os.dup2(stream, number)
            sys.stdout, sys.stderr = (os.fdopen(number, "w", closefd=False) for number in (1, 2))
            if variables is not None:
                os.environ.clear()
                os.environ.update(variables)
            if name in _MODULES:
                sys.argv = words[2:]
                runpy.run_module(name, run_name="__main__", alter_sys=True)
                code = 0
            else:
                code = run_here(*words[1:])
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:
            traceback.print_exc()
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(code)


def _run(arguments: list[str], ranks: int, streams: list[str], variables: dict[str, str]) -> int:
    """Run a command to its end, in one process or as ranks; returns the first exit code that is not 0."""
    command = [sys.executable, str(REPO_ROOT / arguments[0]), *arguments[1:]]
    if ranks:
        # A rank takes its share of the cores as threads: here OMP_NUM_THREADS, as other processes of the suite.
        shares = len(os.sched_getaffinity(0)) // int(variables["OMP_NUM_THREADS"])
        threads = {"LOCAL_WORLD_SIZE": str(max(ranks, shares))}
        variables |= {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO", **threads}
    if ranks > 1:
        variables |= {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with open(streams[0], "a") as out, open(streams[1], "a") as error:
        options = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": error}
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {} for rank in range(max(1, ranks))]
        processes = [Fork(command, env=variables | place, **options) for place in places]
    deadline = float("inf")
    while None in [process.poll() for process in processes]:  # of all: any() would stop at a rank that waits for others
        if any(process.returncode for process in processes):
            deadline = min(deadline, time.monotonic() + _GRACE)
        for process in processes if time.monotonic() > deadline else ():
            process.kill()
        time.sleep(0.02)
    return next((process.returncode for process in processes if process.returncode), 0)


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for name in LIBRARIES:
        importlib.import_module(name)
    settle_heap()
    subprocess.Popen = Fork
    started: dict[int, Fork] = {}
    while line := sys.stdin.readline():
        command = json.loads(line)
        if "pid" in command:
            reply = started[command["pid"]].poll()
        elif "log" in command:
            words = [sys.executable, *command["arguments"]]
            with open(command["log"], "w") as log:
                options = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "env": command["variables"]}
                process = Fork(words, start_new_session=True, preexec_fn=ends_with_parent(), **options)
            reply, started[process.pid] = process.pid, process
        else:
            reply = _run(**command)
        print(json.dumps(reply), file=replies, flush=True)


if __name__ == "__main__":
    main()
