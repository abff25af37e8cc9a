"""Power failures at every operation of the writers: what has its name is whole, what was finished stays, and the same
work again ends as if nothing had happened. Hidden temporary folders may stay where the disk forgets their deletion.
"""

import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from drafthead.training import checkpoint
from tests.faults.payload import content, visible_files
from tests.faults.power_loss import Losses, build, preloaded, read_record, rebuild
from tests.faults.stages import steps_done
from tests.faults.writers import RUN, WRITERS
from tests.scripts import run_ok

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc")


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("library"))


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder where a sync costs nothing, if there is one."""
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as folder:
        yield Path(folder)


def recorded(name: str, folder: Path, library: Path, *options: str) -> Losses:
    """What a power loss can make of one writer's files, each of them checked against those it really wrote."""
    (root := folder / "written").mkdir()
    record = folder / "record"
    run_ok("-m", "tests.faults.writers", name, str(root), str(record), *options, **preloaded(library))
    losses = Losses(read_record(record), root)
    on_disk = {str(p.relative_to(root)): None if p.is_dir() else p.read_bytes() for p in root.rglob("*")}
    assert losses.final() == on_disk, "the record misses operations"
    return losses


def payload(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): content(p) for p in visible_files(root, deep=True) if "deepspeed" not in p.parts}


def problems_of_an_artifact(root: Path, promised: list[str], wanted: dict[str, str]) -> list[str]:
    found = payload(root)
    lost = [f"lost {name}" for name in promised if name not in found]
    return lost + [f"half written {name}" for name in found if found[name] != wanted[name]]


def problems_of_a_run(root: Path, promised: list[str], wanted: dict[str, str]) -> list[str]:
    folder = root / RUN
    step = found[1].step if (found := checkpoint.newest(folder)) else 0
    at_least = max((int(name[-8:]) for name in promised), default=0)
    problems = [f"checkpoint {step} of {at_least}"] if step < at_least else []
    return problems + ([f"metrics end before step {step}"] if step > steps_done(folder) else [])


CHECKS: dict[str, Callable[[Path, list[str], dict[str, str]], list[str]]] = {
    "artifact": problems_of_an_artifact, "run": problems_of_a_run,
}  # fmt: skip


def lose_power(name: str, losses: Losses, folder: Path, seed: int, every: int = 1) -> list[str]:
    """Whatever is wrong in any state, before or after the same work is done again."""
    chooser, seen, problems = random.Random(seed), set(), []
    wanted: dict[str, str] = {}
    for place in reversed(losses.places[::every]):
        for tree in losses.states(place, chooser, count=2):
            promised = losses.promised(place)
            key = (*promised, *tree.items())
            if key in seen:
                continue
            seen.add(key)
            (root := folder / "after").mkdir()
            rebuild(tree, root)
            if not wanted:
                wanted = payload(root)
            try:
                found = CHECKS[name](root, promised, wanted)
                WRITERS[name](root, lambda mark: None)
                again = payload(root)
                found += [f"not as undisturbed: {n}" for n in {*again, *wanted} if again.get(n) != wanted.get(n)]
            except Exception as error:
                found = [repr(error)]
            problems += [f"operation {place}: {problem}" for problem in found]
            shutil.rmtree(root)
    print(f"{len(seen)} states of {losses.places}")
    assert len(seen) > 100
    return problems


@pytest.mark.parametrize("name", WRITERS)
def test_a_power_loss_costs_nothing_that_was_finished(name, memory, library, fault_seed):
    assert not lose_power(name, recorded(name, memory, library), memory, fault_seed)


def test_without_a_sync_it_would_be_noticed(memory, library):
    problems = lose_power("artifact", recorded("artifact", memory, library, "--unsynced"), memory, 0, every=10)
    assert any("lost" in problem for problem in problems)
    assert any("half written" in problem for problem in problems)
