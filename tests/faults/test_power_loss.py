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


@pytest.mark.parametrize("name", WRITERS)
def test_a_power_loss_costs_nothing_that_was_finished(name, memory, library):
    (root := memory / "written").mkdir()
    run_ok("-m", "tests.faults.writers", name, str(root), str(memory / "record"), **preloaded(library))
    names, problems = losses(read_record(memory / "record"), root)
    assert names == {str(path.relative_to(root)) for path in root.rglob("*")}, "the record misses operations"
    assert not problems
