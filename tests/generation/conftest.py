"""A recipe small enough to run the generation stages in seconds, and its responses, made once."""

from collections.abc import Callable
from pathlib import Path

import pytest

from drafthead.config import Recipe, load_recipe

SMALL = (
    "prompts.max_train=12", "prompts.max_heldout=4", "prompts.validation=4", "responses.prompts_per_part=8",
    "responses.max_tokens=32", "states.sequences_per_shard=8", "train.num_ttt_steps=3", "eval.max_tokens=32",
)  # fmt: skip


def small_recipe(output_dir: Path, *overrides: str) -> Recipe:
    return load_recipe(overrides=[f"output_dir={output_dir}", *SMALL, *overrides])


@pytest.fixture
def recipe_in(tmp_path: Path) -> Callable[..., Recipe]:
    """A small recipe that writes below the test's own folder."""
    return lambda *overrides: small_recipe(tmp_path, *overrides)


@pytest.fixture(scope="session")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    """A recipe whose prompts and responses exist; tests that change them work on a copy."""
    from drafthead.generation.prompts.splits import make_prompts
    from drafthead.generation.responses.regenerate import regenerate

    recipe = small_recipe(tmp_path_factory.mktemp("regenerated"))
    make_prompts(recipe)
    regenerate(recipe)
    return recipe
