"""A chain of stages to be killed one after the other, the table of what happened, and a head to damage."""

import os
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from drafthead.exporting.export import write_head
from tests.exporting.runs import random_weights, recipe_at, shape_of
from tests.faults.campaign import Campaign


@pytest.fixture(scope="session")
def fault_seed() -> int:
    """Of every random choice; DRAFTHEAD_FAULT_SEED repeats them, though no machine repeats its times."""
    seed = int(os.environ.get("DRAFTHEAD_FAULT_SEED") or time.time_ns() % 2**32)
    print(f"DRAFTHEAD_FAULT_SEED={seed}")  # shown when a test fails
    return seed


@pytest.fixture
def chooser(request: pytest.FixtureRequest, fault_seed: int) -> random.Random:
    """Choices of one test: the same for the same seed, whatever else runs."""
    return random.Random(f"{fault_seed} {request.node.name}")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A public head of the embedded target."""
    recipe = recipe_at(tmp_path_factory.mktemp("public"))
    shape = shape_of(recipe)
    write_head(recipe, recipe.head_dir, random_weights(shape), shape, recipe.target.aux_layer_ids)
    return recipe.head_dir


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory, fault_seed: int) -> Campaign:
    """One kill per stage, two ranks in training. One method beside the baseline: n-gram spoils this process."""
    short = ("eval.methods=[eagle3]", "eval.workloads=all", "train.epochs=4")
    campaign = Campaign(tmp_path_factory.mktemp("faults"), fault_seed, *short)
    del campaign.chain["train, 1 rank"]
    return campaign


@pytest.fixture(scope="module")
def soak_campaign(tmp_path_factory: pytest.TempPathFactory, fault_seed: int) -> Iterator[Campaign]:
    """Many kills per stage, with all methods and in processes of their own; ends with the table."""
    campaign = Campaign(tmp_path_factory.mktemp("soak"), fault_seed)
    yield campaign
    print(f"\n\n{campaign.table()}")
