"""Prompts, responses and states of one small recipe, made once."""

import pytest

from drafthead.config import Recipe
from tests.generation.small import copy_of, small_recipe


@pytest.fixture(scope="session")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe whose prompts and responses exist; tests that change them work on a copy."""
    from drafthead.generation.prompts import make_prompts
    from drafthead.generation.regenerate import regenerate

    recipe = small_recipe(tmp_path_factory.mktemp("regenerated"))
    make_prompts(recipe)
    regenerate(recipe)
    return recipe


@pytest.fixture(scope="session")
def harvested(regenerated: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """The same with its states, by vLLM in bf16; tests that change them work on a copy."""
    from drafthead.generation.harvest import harvest

    recipe = copy_of(regenerated, tmp_path_factory.mktemp("harvested") / "vllm-bf16")
    harvest(recipe)
    return recipe
