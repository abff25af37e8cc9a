"""Settings of the whole suite."""

import os
from pathlib import Path

# Two workers on two cores: OpenMP threads that wait for one another would spin, here and in what tests start.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest
import torch
from hypothesis import settings

from drafthead.config import load_recipe

# The tensors here are tiny: a second OpenMP thread would only spin, and slow down what runs beside it.
torch.set_num_threads(1)

# How long an example takes says something of the machine, nothing of the code.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


# Tests of the chain of stages share one run of it, which takes minutes.
_CHAIN = {path for path in Path(__file__).parent.glob("pipeline/test_*.py") if "tiny_run" in path.read_text()}


def pytest_collection_modifyitems(items):
    # The chain first, since it takes longest, then files that start engines: workers even out on short tests.
    long = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path not in _CHAIN, item.path not in long))
    for item in items:
        if item.get_closest_marker("requires_gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A worker takes all tests of a file, and those of the chain together, so that nothing shared is made twice."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "chain" if config.rootpath / file in _CHAIN else file

    return ByFile(config, log)


@pytest.fixture(scope="session")
def tokenizer():
    """The embedded target's; a test that changes it works on a copy."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(load_recipe().target_path)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no network. The hub's client reads its own variables once, at import."""
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    return folder
