"""Every file-system operation of a stage in turn: the process dies there, or it fails; then the same command again.

    python -m tests.faults.crash_points [--stage NAME ...] [--fault NAME ...] [--sample N]

A preloaded library (faulty_io.c) counts the operations below the output folder. A process that has imported everything
forks for each point, so that a point costs the work and not the start; engines run in it, servers are started anew.
After a kill: whatever has its name is whole, and no process goes on. After an error: one message, and
code 1. After either, the same command ends with the payload of the undisturbed run and leaves nothing behind; where
another fault left the very same files, it was run already. Each stage works on what those before it made.
"""

import argparse
import ctypes
import errno
import importlib
import json
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psutil
import vllm

from drafthead import artifacts
from drafthead.engine.offline import keep_engines_in_this_process, repair_cpu_build
from drafthead.files import sha256_file
from drafthead.locks import LOCK
from tests.evaluation.rows import write_results
from tests.faults.payload import content
from tests.faults.power_loss import LIBRARY, build, preloaded
from tests.faults.stages import NAME, RESULTS, SMALL, TRAIN, Stage
from tests.recipes import tiny_recipe
from tests.scripts import run_here, settle_heap
from tests.warm import LIBRARIES, QUIET, Fork

_KILL, _SHORT = -1, -2  # as in faulty_io.c
FAULTS = {
    "kill": _KILL, "EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EROFS": errno.EROFS, "EINTR": errno.EINTR,
    "short": _SHORT,
}  # fmt: skip
_HANGS_AFTER, _ENDS_WITHIN = 120, 20  # seconds
_READS = ("open /", "read /", "opendir /")  # operations at which nothing is killed
_GOES_ON = "a process that was started goes on"
_RANDOM = re.compile(r"\.[0-9a-f]{8}(?=\.)|\.tmp\w{6}$", re.MULTILINE)  # of temporary names
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
# Besides SMALL: a few steps with two checkpoints, the first of which is deleted; little to compute.
_SMALLER = (
    "prompts.max_train=3", "prompts.max_heldout=3", "prompts.validation=1", "responses.prompts_per_part=2",
    "responses.max_tokens=12", "states.backend=transformers", "states.sequences_per_shard=2", "train.epochs=2",
    "train.checkpoint_every=1", "train.keep_checkpoints=1", "train.tokens_per_batch=256", "train.batches_per_step=1",
    "head.num_ttt_steps=1", "eval.num_draft_tokens=1", "eval.max_tokens=12", "eval.prompts_per_level=1",
    "eval.methods=[head]", "eval.workloads=all",
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A stage, and what it is given besides.

    Attributes:
        needs: the stage before it; "" for none.
        arguments: further arguments of the stage, besides SMALL.
        copied: folders below data/NAME that the stage reads under another name.
        used_up: folder that the stage reads and empties.
    """

    stage: Stage
    needs: str
    arguments: tuple[str, ...] = ()
    copied: tuple[str, ...] = ()
    used_up: str = ""

    def run(self, root: Path) -> list[str]:
        return self.stage.arguments(root, *_SMALLER, *self.arguments)

    def prepare(self, root: Path) -> None:
        """Make or copy what it reads that no stage made for it."""
        if self.stage.name == "report" and not (root / RESULTS / "serving").exists():
            write_results(tiny_recipe(root, *SMALL, *_SMALLER), head_speed={1: 1.3, 8: 0.9})
        for folder in self.copied:
            name = next(a for a in self.arguments if a.startswith("name=")).removeprefix("name=")
            shutil.copytree(root / "data" / NAME / folder, root / "data" / name / folder, dirs_exist_ok=True)
        if self.used_up:
            shutil.copytree(root / self.used_up, kept(root))

    def clear(self, root: Path) -> None:
        """As if the stage had never run."""
        self.stage.clear(root)
        if self.used_up:
            shutil.copytree(kept(root), root / self.used_up)


def kept(root: Path) -> Path:
    """Where a copy of what is used up lies."""
    return root.with_name("kept")


def _subject(needs: str, name: str, script: str, writes: str, *arguments: str, **more: Any) -> Subject:
    return Subject(Stage(name, script, tuple(writes.split()), deep=name != "report"), needs, arguments, **more)


# Which start the same engines however far they are: none can start beside one that was started before.
_SAME_ENGINES = ("regenerate", "harvest-vllm", "acceptance")
_REGENERATE, _HARVEST, _VLLM = "data_gen/regenerate.py", "data_gen/harvest.py", "states.backend=vllm"
_SPOOL = ("name=spool", "states.spool_shards=8")  # with room for all that training reads
SUBJECTS = {
    subject.stage.name: subject
    for subject in (
        _subject("", "prompts", "data_gen/prompts.py", f"data/{NAME}/prompts"),
        _subject("prompts", "regenerate", _REGENERATE, f"data/{NAME}/responses"),
        _subject("regenerate", "harvest", _HARVEST, f"data/{NAME}/states"),
        _subject(
            "regenerate", "harvest-vllm", _HARVEST, "data/vllm/states", "name=vllm", _VLLM,
            copied=("prompts", "responses"),
        ),
        _subject("regenerate", "spool", _HARVEST, "data/spool/states", *_SPOOL, copied=("prompts", "responses")),
        _subject("harvest", "train", TRAIN, f"runs/{NAME}"),
        _subject("spool", "online", TRAIN, "runs/spool data/spool/states", *_SPOOL, used_up="data/spool/states"),
        _subject("train", "export", "export/head.py", f"heads/{NAME}"),
        _subject(
            "export", "import", "export/import_head.py", "runs/other", "name=other", "--head", f"ROOT/heads/{NAME}"
        ),
        _subject("export", "acceptance", "eval/acceptance.py", f"{RESULTS}/acceptance"),
        _subject("export", "serving", "eval/serving.py", f"{RESULTS}/serving"),
        _subject("", "report", "eval/report.py", RESULTS),
    )
}  # fmt: skip


def with_needs(names: Iterable[str]) -> set[str]:
    """These stages and those that they need."""
    found = {name for name in names if name}
    return found | with_needs(SUBJECTS[name].needs for name in found) if found else found


class _Unharmed(Fork):
    """What a stage starts, in which no operation is hit."""

    def _execute_child(self, args: Any, executable: Any, before: Any, *rest: Any) -> None:
        def begin() -> None:
            ctypes.CDLL(os.environ[LIBRARY]).fault_arm(b"", 0, 0, 0)
            before()

        super()._execute_child(args, executable, before and begin, *rest)


class Zygote:
    """Runs commands in forks of this process, which has the library preloaded, with a fault at one operation."""

    def __init__(self, root: Path, aside: Path):
        self.root, self._log, self._result = root, aside / "log", aside / "result"
        self.report, self._wanted = aside / "report.json", aside / "engines"
        self._operations = aside / "operations"
        self._engines: dict[str, Any] = {}  # by their arguments
        self._library = ctypes.CDLL(os.environ[LIBRARY])
        self._library.fault_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
        self._library.fault_what.restype = ctypes.c_char_p

    def run(self, arguments: list[str], at: int = 0, fault: int = 0) -> tuple[int, str, list[str], str]:
        """Returns the exit code (negative: the signal), the output, the operations, and the one hit."""
        arguments = [argument.replace("ROOT", str(self.root)) for argument in arguments]
        self._result.unlink(missing_ok=True)
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        pid = os.fork()
        if pid == 0:
            self._child(arguments, at, fault)
        _, status = os.waitpid(pid, 0)
        what = self._result.read_text() if self._result.exists() else ""
        operations = _RANDOM.sub("", self._operations.read_text(errors="replace")).splitlines()
        output = self._log.read_text(errors="replace") + self._gone_on()
        return os.waitstatus_to_exitcode(status), output, operations, what

    def _gone_on(self) -> str:
        """Wait for what the command started, which is this process's child now; says so where it does not end."""
        deadline = time.monotonic() + _ENDS_WITHIN
        while time.monotonic() < deadline:
            try:
                if not os.waitpid(-1, os.WNOHANG)[0]:
                    time.sleep(0.02)
            except ChildProcessError:
                return ""
        for child in psutil.Process().children(recursive=True):
            child.kill()
        return f"\n{_GOES_ON}"

    def _child(self, arguments: list[str], at: int, fault: int) -> None:
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = 1
        signal.alarm(_HANGS_AFTER)
        subprocess.Popen = _Unharmed
        start, expected = vllm.LLM, []
        vllm.LLM = lambda **options: (expected.append(options), self._engines.get(repr(options)) or start(**options))[1]
        try:
            self._library.fault_trace(os.open(self._operations, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND))
            self._arm(self.root, at, fault)
            code = run_here(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            found = self._library.fault_what().decode()
            self._arm(None, 0, 0)
            self._result.write_text(found)
            self._wanted.write_bytes(pickle.dumps(expected))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def start_engines(self) -> None:
        """Start the engines that the last command had, for all that follow: what they read of a head is not counted."""
        keep_engines_in_this_process()
        repair_cpu_build()
        for options in pickle.loads(self._wanted.read_bytes()):
            engine = self._engines[repr(options)] = vllm.LLM(**options)
            engine.llm_engine.engine_core.shutdown = lambda: None

    def _arm(self, root: Path | None, at: int, fault: int) -> None:
        self._library.fault_arm(os.fsencode(root or ""), at, fault, fault not in (0, _KILL))


def try_stage(
    subject: Subject, zygote: Zygote, faults: list[str], sample: int | None, chooser: random.Random
) -> list[str]:
    """Try the operations of a stage; returns what failed, and prints how many were tried.

    Args:
        subject: stage that is tried.
        zygote: zygote whose root has the inputs.
        faults: names of the faults.
        sample: number of operations tried for each fault; None: all.
        chooser: random generator of the sample.
    """
    name = subject.stage.name
    subject.clear(zygote.root)
    code, output, with_reads, _ = zygote.run(subject.run(zygote.root), fault=errno.EIO)
    assert code == 0, f"{name} undisturbed:\n{output}"
    operations, tried = {}, {}
    for fault in faults:
        operations[fault] = found = [o for o in with_reads if fault != "kill" or not o.startswith(_READS)]
        # Of a row of equal ones, as most writes to one file are, the first and the last.
        points = [at for at in range(1, len(found) + 1) if at in (1, len(found)) or len({*found[at - 2 : at + 1]}) > 1]
        tried[fault] = sorted(chooser.sample(points, min(sample, len(points)))) if sample else points
    pid = os.fork()
    if pid == 0:
        _try_all(subject, zygote, tried)
    assert os.waitpid(pid, 0)[1] == 0, "the process that tries faults ended"
    failures = json.loads(zygote.report.read_text())
    for fault in faults:
        counts = f"{len(tried[fault]):>5} of {len(operations[fault])} operations tried, {len(failures[fault])} failed"
        print(f"{name:<10} {fault:<8} {counts}", flush=True)
    return [failure for of_one in failures.values() for failure in of_one]


def _try_all(subject: Subject, zygote: Zygote, points: dict[str, list[int]]) -> NoReturn:
    """Try operations by fault after an undisturbed run, in a process that ends with it, as the engines that it has."""
    code = 1
    try:
        expected, known, failures = subject.stage.payload(zygote.root), set(), {}
        if subject.stage.name in _SAME_ENGINES:
            zygote.start_engines()
        for fault in points:
            found = [_try(subject, zygote, fault, at, expected, known) for at in points[fault]]
            failures[fault] = [failure for failure in found if failure]
        zygote.report.write_text(json.dumps(failures))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _try(subject: Subject, zygote: Zygote, fault: str, at: int, expected: dict[str, str], known: set[str]) -> str:
    """One operation; returns what is wrong, "" for nothing.

    `known` has digests of what the stage was resumed from without a problem; this one is added.
    """
    stage, root, command = subject.stage, zygote.root, subject.run(zygote.root)
    subject.clear(root)
    code, output, _, what = zygote.run(command, at, FAULTS[fault])
    problems = _after(fault, code, output, stage.payload(root, finished=False), expected)
    if (left := _state(stage, root)) not in known:
        code, output, _, _ = zygote.run(command)
        if code:
            problems.append(f"the same command ended with {code}: {output[-600:]}")
        else:
            found = stage.payload(root)
            if different := [n for n in {*found, *expected} if found.get(n) != expected.get(n)]:
                problems.append(f"not as undisturbed: {sorted(different)}")
            if leftovers := stage.leftovers(root):
                problems.append(f"left behind: {sorted(map(str, leftovers))}")
        if not problems:
            known.add(left)
    if problems:
        where = f"{stage.name}: {fault} at operation {at}" + (f" ({what})" if what else "")
        problems = [f"{where}: {'; '.join(problems)}"]
        print(problems[0], flush=True)
    return "".join(problems)


def _state(stage: Stage, root: Path) -> str:
    """A digest of everything that lies in a stage's folders, but for times and random names."""
    found = []
    for name in stage.names(root):
        path, text = root / name, ""
        if path.is_file() and path.name != LOCK:
            try:
                text = content(path)
            except Exception:  # it is half written
                text = sha256_file(path)
        found.append((_RANDOM.sub("", name), text))
    return artifacts.digest([stage.name, *sorted(found)])


def _after(fault: str, code: int, output: str, found: dict[str, str], expected: dict[str, str]) -> list[str]:
    """What is wrong right after a kill or an error."""
    problems = [_GOES_ON] if _GOES_ON in output else []
    if fault == "kill" and code not in (-signal.SIGKILL, 0):
        problems.append(f"ended with {code}: {output[-600:]}")
    if fault != "kill":
        if code not in (0, 1):
            problems.append(f"ended with {code}")
        if "Traceback" in output:
            problems.append(f"a traceback: {output[-1500:]}")
    if different := [name for name in found if expected.get(name, found[name]) != found[name]]:
        problems.append(f"half written: {sorted(different)}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--fault", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--sample", type=int, help="so many operations of each stage and fault; default: all")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if LIBRARY not in os.environ:  # once more, with the library preloaded
        with tempfile.TemporaryDirectory() as folder:
            variables = {**os.environ, **preloaded(build(Path(folder)))}
            again = [sys.executable, "-m", "tests.faults.crash_points", *sys.argv[1:]]
            sys.exit(subprocess.run(again, env=variables, check=False).returncode)
    os.environ.update(QUIET)
    for name in LIBRARIES:
        importlib.import_module(name)
    settle_heap()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where a sync costs nothing
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        root, failures, chooser = Path(folder, "root"), [], random.Random(args.seed)
        root.mkdir()
        zygote = Zygote(root, Path(folder))
        for name, subject in SUBJECTS.items():
            if name not in with_needs(args.stage):
                continue
            subject.prepare(root)
            if name in args.stage:
                failures += try_stage(subject, zygote, args.fault, args.sample, chooser)
            code, output, _, _ = zygote.run(subject.run(root))  # a later stage may need what it makes
            assert code == 0, f"{name} undisturbed:\n{output}"
    print(f"{len(failures)} failures")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
