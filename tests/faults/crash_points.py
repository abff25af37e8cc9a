"""Every file-system operation of a stage in turn: the process dies there, or it fails; then the same command again.

    python -m tests.faults.crash_points [--stage NAME ...] [--fault NAME ...] [--sample N]

A preloaded library (faulty_io.c) counts the operations below the output folder. A process that has imported everything
forks for each point, so that a point costs the work and not the start. After a kill: whatever has its name is whole.
After an error: one message that names a file, and code 2. After either, the same command ends with the payload of the
undisturbed run and leaves nothing behind. Stages that start vLLM are killed by `make soak` only.
"""

import argparse
import contextlib
import ctypes
import errno
import importlib
import json
import os
import random
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

from drafthead import artifacts
from drafthead.config import Recipe
from drafthead.data import responses
from drafthead.target.pieces import load_target_spec, target_identity
from tests.artifacts import response
from tests.faults.stages import NAME, SMALL, Stage
from tests.recipes import tiny_recipe
from tests.scripts import run_here
from tests.training.synthetic import synthetic_store

_LIBRARY = "DRAFTHEAD_FAULTY_IO"
_KILL, _SHORT = -1, -2  # as in faulty_io.c
FAULTS = {
    "kill": _KILL, "EIO": errno.EIO, "ENOSPC": errno.ENOSPC, "EROFS": errno.EROFS, "EINTR": errno.EINTR,
    "short": _SHORT,
}  # fmt: skip
# Besides SMALL: a few steps with two checkpoints, the first of which is deleted.
_SMALLER = (
    "states.backend=transformers", "states.sequences_per_shard=4", "train.epochs=8", "train.checkpoint_every=2",
    "train.keep_checkpoints=1",
)  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """A stage, what it is given besides, and what makes its inputs."""

    stage: Stage
    arguments: tuple[str, ...] = ()
    inputs: Callable[[Recipe], None] = lambda recipe: None

    def run(self, root: Path) -> list[str]:
        return self.stage.command(root, *_SMALLER, *self.arguments)[1:]


def _responses(recipe: Recipe) -> None:
    """Responses whose text the target never wrote; drawn, so that nobody expects its argmax to be the text."""
    identity = {"target": target_identity(recipe, load_target_spec(recipe.target_path))}
    chooser = random.Random(0)
    for split, count in (("train", 9), ("validation", 3)):
        directory = recipe.responses_dir(split)
        artifacts.begin(directory, responses.KIND, identity)
        texts = [[chooser.randrange(300, 2000) for _ in range(20)] for _ in range(count)]
        given = [replace(response(f"{split}{i}", 8, 12, ids=ids), temperature=1.0) for i, ids in enumerate(texts)]
        responses.write_part(responses.part_path(directory, 0), given)
        artifacts.finish(directory, {})


def _states(recipe: Recipe) -> None:
    shutil.rmtree(recipe.prompts_dir.parent, ignore_errors=True)  # prompts and responses that are not of these states
    for split, count in (("train", 12), ("validation", 4)):
        synthetic_store(recipe, split, count, seed=count)


SUBJECTS = {
    subject.stage.name: subject
    for subject in (
        Subject(Stage("prompts", "data_gen/prompts.py", (f"data/{NAME}/prompts", f"results/{NAME}/prompts"), "")),
        Subject(Stage("harvest", "data_gen/harvest.py", (f"data/{NAME}/states",), ""), (), _responses),
        Subject(Stage("train", "train/eagle3.py", (f"runs/{NAME}",), ""), (), _states),
        Subject(Stage("export", "export/head.py", (f"heads/{NAME}",), ""), ("--no-serve-check",)),
        Subject(
            Stage("import", "export/import_head.py", ("runs/other",), ""),
            ("name=other", "--head", "ROOT/heads/tiny"),
        ),
    )
}


class Zygote:
    """Runs commands in forks of this process, which has the library preloaded, with a fault at one operation."""

    def __init__(self, root: Path, aside: Path):
        self.root, self._log, self._result = root, aside / "log", aside / "result.json"
        self._modules = aside / "modules"
        self._library = ctypes.CDLL(os.environ[_LIBRARY])
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


def try_points(subject: Subject, zygote: Zygote, fault: str, sample: int | None, chooser: random.Random) -> list[str]:
    """Try the operations of a stage; returns what failed, and prints how many were tried."""
    stage, root, command = subject.stage, zygote.root, subject.run(zygote.root)
    stage.clear(root)
    subject.inputs(tiny_recipe(root, *SMALL, *_SMALLER))
    code, output, count, _ = zygote.run(command, 0, FAULTS[fault])
    assert code == 0, f"{stage.name} undisturbed:\n{output}"
    zygote.warm()
    wanted = stage.payload(root)
    points = range(1, count + 1)
    tried = sorted(chooser.sample(points, min(sample, count))) if sample else list(points)
    failures, began = [], time.monotonic()
    for at in tried:
        stage.clear(root)
        code, output, _, what = zygote.run(command, at, FAULTS[fault])
        where = f"{stage.name}: {fault} at operation {at} of {count}" + (f" ({what})" if what else "")
        problems = _after(fault, code, output, stage.payload(root, finished=False), wanted, root)
        code, output, _, _ = zygote.run(command)
        if code:
            problems.append(f"the same command ended with {code}: {output[-600:]}")
        else:
            found = stage.payload(root)
            if different := [n for n in {*found, *wanted} if found.get(n) != wanted.get(n)]:
                problems.append(f"not as undisturbed: {sorted(different)}")
            if left := stage.leftovers(root):
                problems.append(f"left behind: {sorted(map(str, left))}")
        if problems:
            failures.append(f"{where}: {'; '.join(problems)}")
            print(failures[-1], flush=True)
    counts = f"{len(tried):>5} of {count} operations tried, {len(failures)} failed"
    print(f"{stage.name:<10} {fault:<8} {counts}, {time.monotonic() - began:.0f} s", flush=True)
    return failures


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


def build(folder: Path) -> Path:
    """Compile the library."""
    library = folder / "faulty_io.so"
    source = Path(__file__).with_name("faulty_io.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stage", nargs="+", choices=SUBJECTS, default=list(SUBJECTS))
    parser.add_argument("--fault", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--sample", type=int, help="so many operations of each stage and fault; default: all")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if _LIBRARY not in os.environ:  # once more, with the library preloaded
        with tempfile.TemporaryDirectory() as folder:
            library = str(build(Path(folder)))
            more = {_LIBRARY: library, "LD_PRELOAD": library, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
            again = [sys.executable, "-m", "tests.faults.crash_points", *sys.argv[1:]]
            sys.exit(subprocess.run(again, env={**os.environ, **more}, check=False).returncode)
    for name in ("deepspeed", "accelerate", "datasets", "drafthead.training.trainer", "drafthead.exporting.export"):
        __import__(name)
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # where a sync costs nothing
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        (root := Path(folder, "root")).mkdir()
        zygote, chooser, failures = Zygote(root, Path(folder)), random.Random(args.seed), []
        for name, subject in SUBJECTS.items():
            if name in args.stage:
                for fault in args.fault:
                    failures += try_points(subject, zygote, fault, args.sample, chooser)
            else:  # a later stage may need what it makes
                subject.inputs(tiny_recipe(root, *SMALL, *_SMALLER))
                if name in ("train", "export") and {"export", "import"} & set(args.stage):
                    zygote.run(subject.run(root))
    print(f"{len(failures)} failures")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
