"""Settings of the whole suite."""

import pytest
import torch
from hypothesis import settings

# The tensors here are tiny: a second OpenMP thread would only spin, and slow down what runs beside it.
torch.set_num_threads(1)

# How long an example takes says something of the machine, nothing of the code.
settings.register_profile("suite", deadline=None)
settings.load_profile("suite")


def pytest_collection_modifyitems(items):
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("requires_gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
