"""What every stage needs of the target and the recipe, asked by the first command: a later stage would ask after hours.

Only config.json and the tokenizer's files are read, and neither torch nor vLLM is imported, which takes seconds.
"""

from drafthead.config import Recipe
from drafthead.target.spec import TargetSpec, recipe_spec


def preflight(recipe: Recipe) -> None:
    """Refuse a recipe that a later stage would refuse.

    Raises:
        FileNotFoundError: a file of the target is missing.
        ValueError: the recipe and its target do not fit each other, or the installed vLLM; the message has the value
            and what to change.
    """
    spec = recipe_spec(recipe)
    recipe.head.check_vocabulary(spec.vocab_size)
    check_jitter(recipe, spec)


def check_jitter(recipe: Recipe, spec: TargetSpec) -> None:
    """Refuse positions that the target does not have.

    Raises:
        ValueError: train.position_jitter lies beyond the target.
    """
    longest, jitter = recipe.engine.max_model_len, recipe.train.position_jitter
    if jitter and longest + jitter > spec.max_position_embeddings:
        raise ValueError(
            f"train.position_jitter {jitter} behind engine.max_model_len {longest} tokens exceeds the target's "
            f"{spec.max_position_embeddings} positions; set it lower"
        )
