"""A store of hidden states small enough to train on in seconds, and a recipe that reads it."""

from pathlib import Path

import pytest

from drafthead.config import Recipe
from tests.training.launching import run
from tests.training.synthetic import small_recipe, synthetic_store


@pytest.fixture(scope="session")
def synthetic_data(tmp_path_factory) -> Path:
    """Output directory that holds both splits' states for `small_recipe`."""
    output = tmp_path_factory.mktemp("synthetic")
    recipe = small_recipe(output)
    synthetic_store(recipe, "train", 60, seed=0)
    synthetic_store(recipe, "validation", 16, seed=1)  # fewer decide nothing
    return output


@pytest.fixture(scope="module")
def run_factory(synthetic_data, tmp_path_factory):
    """As `fresh_recipe`, for runs that several tests of a module look at."""
    base = tmp_path_factory.mktemp("runs")

    def make(name: str) -> Recipe:
        (base / name).mkdir()
        (base / name / "data").symlink_to(synthetic_data / "data")
        return small_recipe(base / name)

    return make


@pytest.fixture
def fresh_recipe(synthetic_data, tmp_path):
    """A factory of recipes over the shared states, each with a run directory of its own."""

    def make(*overrides: str, name: str = "tiny") -> Recipe:
        root = tmp_path / name
        root.mkdir(exist_ok=True)
        if not (root / "data").exists():
            (root / "data").symlink_to(synthetic_data / "data")
        return small_recipe(root, *overrides)

    return make


@pytest.fixture(scope="session")
def finished_run(synthetic_data, tmp_path_factory) -> Recipe:
    """One undisturbed run of `small_recipe`; who changes it works on a copy."""
    root = tmp_path_factory.mktemp("finished")
    (root / "data").symlink_to(synthetic_data / "data")
    recipe = small_recipe(root)
    run(recipe)
    return recipe
