"""Settings of the whole suite."""

import pytest
import torch
from hypothesis import settings

# The tensors here are tiny: a second OpenMP thread would only spin, and slow down what runs beside it.
torch.set_num_threads(1)

# How long an example takes says something of the machine, nothing of the code.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items):
    # The longest first: with two workers it runs beside all the rest.
    items.sort(key=lambda item: not _of_the_chain(item))
    for item in items:
        # A worker takes all tests of a group, so that nothing that they share is made twice.
        item.add_marker(pytest.mark.xdist_group("chain" if _of_the_chain(item) else str(item.path)))
        if item.get_closest_marker("requires_gpu") and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def _of_the_chain(item) -> bool:
    return "tiny_run" in item.fixturenames
