"""Settings of the whole suite."""

import os
import shutil
from pathlib import Path

# Workers share the cores: OpenMP threads that wait for one another would spin, here and in what tests start.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from hypothesis import settings

from drafthead.config import load_recipe
from tests.public_targets import fill_hub
from tests.scripts import settle_heap

# The tensors here are tiny: a second OpenMP thread would only spin, and slow down what runs beside it.
torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))

# How long an example takes says something of the machine, nothing of the code.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


# A fixture that takes long -> the folder of the files that use it. They stay together, so that one worker makes it,
# once; except for the embedded recipe's run, which workers share.
_LONG = {"tiny_run": "pipeline", "regenerated": "generation", "harvested": "generation", "finished_run": "training"}
_USERS = {
    path: fixture
    for fixture, folder in _LONG.items()
    for path in Path(__file__).parent.glob(f"{folder}/test_*.py")
    if fixture in path.read_text()
}
# The longest first, one of them on the embedded recipe's run: at the end no worker is alone.
_LONGEST = [
    Path(__file__).parent / f"{name}.py"
    for name in ("pipeline/test_adapting", "training/test_options", "faults/test_kills", "training/test_ranks",
                 "pipeline/test_chain", "pipeline/test_drafters", "faults/test_crash_points", "exporting/test_check")
]  # fmt: skip


def pytest_collection_modifyitems(items):
    # Then the other files that start engines: workers even out on short tests.
    long = {item.path for item in items if item.get_closest_marker("slow")}
    rank = {path: place for place, path in enumerate(_LONGEST)}
    items.sort(key=lambda item: (rank.get(item.path, len(rank)), item.path not in long))
    for item in items:
        if item.get_closest_marker("presets") or set(_LONG) & set(item.fixturenames):
            # Whichever test comes first makes the fixture, on a machine that may be busy; or five servers of 48 levels.
            item.add_marker(pytest.mark.timeout(3600))
        elif item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.timeout(1800))
        if item.get_closest_marker("requires_gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish():
    settle_heap()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A worker takes all tests of a file, and of the files that share a fixture, so that nothing is made twice."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            fixture = _USERS.get(config.rootpath / file, "tiny_run")
            return file if fixture == "tiny_run" else _LONG[fixture]

    return ByFile(config, log)


@pytest.fixture(scope="session")
def tokenizer():
    """The embedded target's; a test that changes it works on a copy."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(load_recipe().target_path)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A copy of the embedded target, to be changed."""
    return Path(shutil.copytree(load_recipe().target_path, tmp_path / "target"))


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no network. The hub's client reads its own variables once, at import."""
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return folder


@pytest.fixture
def public_targets(hub_cache: Path) -> None:
    """config.json of every public target in that cache, as a download would leave it."""
    fill_hub(hub_cache)
