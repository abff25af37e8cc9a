"""Recipes of the generation stages, and the responses of one, made once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from drafthead.config import Recipe
from tests.generation.small import small_recipe


@pytest.fixture
def recipe_in(tmp_path: Path) -> Callable[..., Recipe]:
    """A small recipe that writes below the test's own folder."""
    return lambda *overrides: small_recipe(tmp_path, *overrides)


@pytest.fixture(scope="session")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe whose prompts and responses exist; tests that change them work on a copy."""
    from drafthead.generation.prompts import make_prompts
    from drafthead.generation.regenerate import regenerate

    recipe = small_recipe(tmp_path_factory.mktemp("regenerated"))
    make_prompts(recipe)
    regenerate(recipe)
    return recipe
