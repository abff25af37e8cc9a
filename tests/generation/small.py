"""A recipe small enough to run the generation stages in seconds, and copies of what it made."""

import shutil
from pathlib import Path

from drafthead.config import Recipe
from tests.recipes import tiny_recipe

SMALL = (  # in bf16, as large targets are
    "states.prompt_loss=0",
    "target.dtype=bfloat16", "prompts.max_train=12", "prompts.max_heldout=4", "prompts.validation=4",
    "responses.prompts_per_part=8", "responses.max_tokens=32", "states.sequences_per_shard=8", "head.num_ttt_steps=3",
    "eval.max_tokens=32",
)  # fmt: skip


def small_recipe(output_dir: Path, *overrides: str) -> Recipe:
    return tiny_recipe(output_dir, *SMALL, *overrides)


def copy_of(recipe: Recipe, directory: Path, **states: object) -> Recipe:
    """The same recipe, with other states settings, over a copy of its artifacts."""
    shutil.copytree(recipe.directory(), directory)
    return recipe.model_copy(update={"output_dir": str(directory)}).changed("states", **states)


def never(*args: object, **kwargs: object) -> None:
    """Instead of what makes responses or states, where none is missing."""
    raise AssertionError("a model was about to run although nothing is missing")
