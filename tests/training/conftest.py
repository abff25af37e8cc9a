"""A store of hidden states small enough to train on in seconds, and a recipe that reads it."""

from pathlib import Path

import pytest

from drafthead.config import Recipe
from tests.training.launching import run
from tests.training.synthetic import small_recipe, synthetic_stores


@pytest.fixture(scope="session")
def synthetic_data(tmp_path_factory) -> Path:
    """Output directory that holds both splits' states for `small_recipe`."""
    output = tmp_path_factory.mktemp("synthetic")
    synthetic_stores(small_recipe(output), 60, 16)  # fewer to validate on decide nothing
    return output


def recipe_over(data: Path, root: Path, *overrides: str) -> Recipe:
    """A recipe over the shared states, with everything else below `root`."""
    root.mkdir(exist_ok=True)
    if not (root / "data").exists():
        (root / "data").symlink_to(data / "data")
    return small_recipe(root, *overrides)


@pytest.fixture(scope="module")
def run_factory(synthetic_data, tmp_path_factory):
    """As `fresh_recipe`, for runs that several tests of a module look at."""
    base = tmp_path_factory.mktemp("runs")
    return lambda name: recipe_over(synthetic_data, base / name)


@pytest.fixture
def fresh_recipe(synthetic_data, tmp_path):
    """A factory of recipes over the shared states, each with a run directory of its own."""
    return lambda *overrides, name="tiny": recipe_over(synthetic_data, tmp_path / name, *overrides)


@pytest.fixture(scope="session")
def finished_run(synthetic_data, tmp_path_factory) -> Recipe:
    """One undisturbed run of `small_recipe`; who changes it works on a copy."""
    recipe = recipe_over(synthetic_data, tmp_path_factory.mktemp("finished"))
    run(recipe)
    return recipe
