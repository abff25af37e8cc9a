"""Power failures while the writers of artifacts and checkpoints work: what has its name is whole and stays.

That the same work goes on from what is left then is tried with kills, in test_crash_points.py.
"""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.power_loss import build, losses, preloaded, read_record
from tests.faults.writers import WRITERS
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


def lost(name: str, folder: Path, library: Path, *options: str) -> list[str]:
    """What a power loss can cost of one writer's files."""
    (root := folder / "written").mkdir()
    run_ok("-m", "tests.faults.writers", name, str(root), str(folder / "record"), *options, **preloaded(library))
    names, problems = losses(read_record(folder / "record"), root)
    assert names == {str(path.relative_to(root)) for path in root.rglob("*")}, "the record misses operations"
    return problems


@pytest.mark.parametrize("name", WRITERS)
def test_a_power_loss_costs_nothing_that_was_finished(name, memory, library):
    assert not lost(name, memory, library)


def test_without_a_sync_it_would_be_noticed(memory, library):
    problems = lost("artifact", memory, library, "--unsynced")
    assert any(problem.startswith("bytes") for problem in problems)
    assert any(problem.startswith("name") for problem in problems)
