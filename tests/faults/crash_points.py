"""Every file-system operation of a stage in turn: the process dies there, or it fails; then the same command again.

    python -m tests.faults.crash_points [--stage NAME ...] [--fault NAME ...] [--sample N] [--processes N]

A preloaded library (faulty_io.c) counts the operations below the output folder. A process that has imported everything
forks for each point, so that a point costs the work and not the start. After a kill: whatever has its name is whole.
After an error: one message that names a file, and code 2. After either, the same command ends with the payload of the
undisturbed run and leaves nothing behind; where another fault left the very same files, it was run already. Stages that
start vLLM are killed by `make soak` only.
"""

import argparse
import contextlib
import ctypes
import errno
import importlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from drafthead import artifacts
from drafthead.config import Recipe
from drafthead.data import responses
from drafthead.files import sha256_file
from drafthead.locks import LOCK
from drafthead.target.pieces import load_target_spec, target_identity
from tests.artifacts import response
from tests.evaluation.rows import write_results
from tests.faults.payload import content
from tests.faults.power_loss import LIBRARY, build, preloaded
from tests.faults.stages import NAME, RESULTS, SMALL, Stage
from tests.recipes import tiny_recipe
from tests.scripts import run_here
from tests.training.synthetic import synthetic_store

_KILL, _SHORT = -1, -2  # as in faulty_io.c
FAULTS = {
    "kill": _KILL, "EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EROFS": errno.EROFS, "EINTR": errno.EINTR,
    "short": _SHORT,
}  # fmt: skip
# Besides SMALL: a few steps with two checkpoints, the first of which is deleted; little to compute.
_SMALLER = (
    "states.backend=transformers", "states.sequences_per_shard=2", "train.epochs=2", "train.checkpoint_every=1",
    "train.keep_checkpoints=1", "train.tokens_per_batch=64", "train.batches_per_step=1", "head.num_ttt_steps=1",
    "eval.num_draft_tokens=1",
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A stage, what it is given besides, and what makes its inputs."""

    stage: Stage
    arguments: tuple[str, ...] = ()
    inputs: Callable[[Recipe], None] = lambda recipe: None

    def run(self, root: Path) -> list[str]:
        return self.stage.arguments(root, *_SMALLER, *self.arguments)


def _responses(recipe: Recipe) -> None:
    """Responses whose text the target never wrote; drawn, so that nobody expects its argmax to be the text."""
    identity = {"target": target_identity(recipe, load_target_spec(recipe.target_path))}
    chooser = random.Random(0)
    for split, count in (("train", 3), ("validation", 1)):
        directory = recipe.responses_dir(split)
        artifacts.begin(directory, responses.KIND, identity)
        texts = [[chooser.randrange(300, 2000) for _ in range(20)] for _ in range(count)]
        given = [replace(response(f"{split}{i}", 8, 12, ids=ids), temperature=1.0) for i, ids in enumerate(texts)]
        responses.write_part(responses.part_path(directory, 0), given)
        artifacts.finish(directory, {})


def _states(recipe: Recipe) -> None:
    shutil.rmtree(recipe.prompts_dir.parent, ignore_errors=True)  # prompts and responses that are not of these states
    for split, count in (("train", 2), ("validation", 1)):
        synthetic_store(recipe, split, count, seed=count)


def _results(recipe: Recipe) -> None:
    if not (recipe.results_dir / "serving").exists():
        write_results(recipe, head_speed={1: 1.3, 8: 0.9})


SUBJECTS = {
    subject.stage.name: subject
    for subject in (
        Subject(Stage("prompts", "data_gen/prompts.py", (f"data/{NAME}/prompts", f"results/{NAME}/prompts"), "")),
        Subject(Stage("harvest", "data_gen/harvest.py", (f"data/{NAME}/states",), ""), (), _responses),
        Subject(  # online mode, with room for all that training would read
            Stage("spool", "data_gen/harvest.py", (f"data/{NAME}/states",), ""),
            ("states.spool_shards=8",),
            _responses,
        ),
        Subject(Stage("train", "train/eagle3.py", (f"runs/{NAME}",), ""), (), _states),
        Subject(Stage("export", "export/head.py", (f"heads/{NAME}",), ""), ("--no-serve-check",)),
        Subject(
            Stage("import", "export/import_head.py", ("runs/other",), ""),
            ("name=other", "--head", "ROOT/heads/tiny"),
        ),
        Subject(Stage("report", "eval/report.py", (RESULTS,), "", deep=False), (), _results),
    )
}


class Zygote:
    """Runs commands in forks of this process, which has the library preloaded, with a fault at one operation."""

    def __init__(self, root: Path, aside: Path):
        self.root, self._log, self._result = root, aside / "log", aside / "result.json"
        self._modules, self.report = aside / "modules", aside / "report.json"
        self._library = ctypes.CDLL(os.environ[LIBRARY])
        self._library.fault_arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
        self._library.fault_count.restype = ctypes.c_long
        self._library.fault_what.restype = ctypes.c_char_p

    def run(self, arguments: list[str], at: int = 0, fault: int = 0) -> tuple[int, str, int, str]:
        """Returns the exit code (negative: the signal), the output, how many operations there were, and the one hit."""
        arguments = [argument.replace("ROOT", str(self.root)) for argument in arguments]
        self._result.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            self._child(arguments, at, fault)
        _, status = os.waitpid(pid, 0)
        count, what = json.loads(self._result.read_text()) if self._result.exists() else (0, "")
        return os.waitstatus_to_exitcode(status), self._log.read_text(errors="replace"), count, what

    def _child(self, arguments: list[str], at: int, fault: int) -> None:
        log = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        code = 1
        try:
            self._arm(self.root, at, fault)
            code = run_here(*arguments)
        except BaseException:
            traceback.print_exc()
        finally:
            found = self._library.fault_count(), self._library.fault_what().decode()
            self._arm(None, 0, 0)
            self._result.write_text(json.dumps(found))
            self._modules.write_text("\n".join(sys.modules))
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def warm(self) -> None:
        """Import what the last command imported, once for all that follow."""
        for name in self._modules.read_text().splitlines():
            if name not in sys.modules:
                with contextlib.suppress(Exception):
                    importlib.import_module(name)

    def _arm(self, root: Path | None, at: int, fault: int) -> None:
        self._library.fault_arm(os.fsencode(root or ""), at, fault, fault not in (0, _KILL))


def try_points(
    subject: Subject, zygotes: list[Zygote], fault: str, sample: int | None, chooser: random.Random, known: set[str]
) -> list[str]:
    """Try the operations of a stage, a share in each root; returns what failed, and prints how many were tried.

    Args:
        subject: the stage.
        zygotes: of which the first one's root has the inputs.
        fault: its name.
        sample: so many operations; None: all.
        chooser: of the sample.
        known: digests of what the stage was resumed from without a problem; those of this fault are added.
    """
    stage, root = subject.stage, zygotes[0].root
    stage.clear(root)
    subject.inputs(tiny_recipe(root, *SMALL, *_SMALLER))
    code, output, count, _ = zygotes[0].run(subject.run(root), 0, FAULTS[fault])
    assert code == 0, f"{stage.name} undisturbed:\n{output}"
    zygotes[0].warm()
    points = range(1, count + 1)
    tried = sorted(chooser.sample(points, min(sample, count))) if sample else list(points)
    began = time.monotonic()
    for zygote in zygotes[1:]:
        shutil.rmtree(zygote.root)
        shutil.copytree(root, zygote.root, symlinks=True)
    children = {}
    for i, zygote in enumerate(zygotes):
        children[os.fork()] = zygote
        if 0 in children:
            _try_all(subject, zygote, fault, tried[i :: len(zygotes)], known)
    failures = []
    for pid, zygote in children.items():
        assert os.waitpid(pid, 0)[1] == 0, "a process that tries faults ended"
        found, resumed = json.loads(zygote.report.read_text())
        failures += found
        known |= set(resumed)
    counts = f"{len(tried):>5} of {count} operations tried, {len(failures)} failed"
    print(f"{stage.name:<10} {fault:<8} {counts}, {time.monotonic() - began:.0f} s", flush=True)
    return failures


def _try_all(subject: Subject, zygote: Zygote, fault: str, points: list[int], known: set[str]) -> NoReturn:
    """A share of the operations, in a process that ends with it."""
    code = 1
    try:
        subject.stage.clear(zygote.root)  # of another root, whose name may stand in it
        assert zygote.run(subject.run(zygote.root))[0] == 0
        wanted = subject.stage.payload(zygote.root)
        failures = [_try(subject, zygote, fault, at, wanted, known) for at in points]
        zygote.report.write_text(json.dumps([[found for found in failures if found], sorted(known)]))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _try(subject: Subject, zygote: Zygote, fault: str, at: int, wanted: dict[str, str], known: set[str]) -> str:
    """One operation; returns what is wrong, "" for nothing."""
    stage, root, command = subject.stage, zygote.root, subject.run(zygote.root)
    stage.clear(root)
    code, output, _, what = zygote.run(command, at, FAULTS[fault])
    problems = _after(fault, code, output, stage.payload(root, finished=False), wanted, root)
    if (left := _state(stage, root)) not in known:
        code, output, _, _ = zygote.run(command)
        if code:
            problems.append(f"the same command ended with {code}: {output[-600:]}")
        else:
            found = stage.payload(root)
            if different := [n for n in {*found, *wanted} if found.get(n) != wanted.get(n)]:
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


_RANDOM = re.compile(r"\.[0-9a-f]{8}(?=\.)|\.tmp\w{6}$")  # of temporary names


def _state(stage: Stage, root: Path) -> str:
    """A digest of everything that lies in a stage's folders, but for times and random names."""
    found = []
    for name in stage.names(root):
        path, said = root / name, ""
        if path.is_file() and path.name != LOCK:
            try:
                said = content(path)
            except Exception:  # it is half written
                said = sha256_file(path)
        found.append((_RANDOM.sub("", name), said))
    return artifacts.digest([stage.name, *sorted(found)])


def _after(fault: str, code: int, output: str, found: dict[str, str], wanted: dict[str, str], root: Path) -> list[str]:
    """What is wrong right after a kill or an error."""
    problems = []
    if fault == "kill" and code not in (-signal.SIGKILL, 0):
        problems.append(f"ended with {code}: {output[-600:]}")
    if fault != "kill":
        if code not in (0, 2):
            problems.append(f"ended with {code}")
        if "Traceback" in output:
            problems.append(f"a traceback: {output[-1500:]}")
        elif code == 2 and str(root) not in output.rsplit("\n\n", 1)[-1]:
            problems.append(f"names no file: {output[-300:]}")
    if different := [name for name in found if wanted.get(name, found[name]) != found[name]]:
        problems.append(f"half written: {sorted(different)}")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--fault", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--sample", type=int, help="so many operations of each stage and fault; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=os.cpu_count(), help="that try faults at a time")
    args = parser.parse_args()
    if LIBRARY not in os.environ:  # once more, with the library preloaded
        with tempfile.TemporaryDirectory() as folder:
            variables = {**os.environ, **preloaded(build(Path(folder)))}
            again = [sys.executable, "-m", "tests.faults.crash_points", *sys.argv[1:]]
            sys.exit(subprocess.run(again, env=variables, check=False).returncode)
    for name in ("deepspeed", "accelerate", "datasets", "drafthead.training.trainer", "drafthead.exporting.export"):
        __import__(name)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where a sync costs nothing
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        asides = [Path(folder, str(i)) for i in range(args.processes)]
        for aside in asides:
            (aside / "root").mkdir(parents=True)
        zygotes, chooser = [Zygote(aside / "root", aside) for aside in asides], random.Random(args.seed)
        failures, root = [], zygotes[0].root
        for name, subject in SUBJECTS.items():
            if name in args.stage:
                known: set[str] = set()
                for fault in args.fault:
                    failures += try_points(subject, zygotes, fault, args.sample, chooser, known)
                zygotes[0].run(subject.run(root))  # a later stage may need what it makes
            else:
                subject.inputs(tiny_recipe(root, *SMALL, *_SMALLER))
                if name in ("train", "export") and {"export", "import"} & set(args.stage):
                    zygotes[0].run(subject.run(root))
    print(f"{len(failures)} failures")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
