"""What every stage needs of the target and the recipe, asked by the first command: a later stage would ask after hours.

Only config.json and the tokenizer's files are read, and neither torch nor vLLM is imported, which takes seconds.
"""

from drafthead.config import Recipe
from drafthead.target.spec import recipe_spec


def preflight(recipe: Recipe) -> None:
    """Refuse a recipe that a later stage would refuse.

    Raises:
        FileNotFoundError: a file of the target is missing.
        ValueError: the recipe and its target do not fit each other, or the installed vLLM; the message has the value
            and what to change.
    """
    spec = recipe_spec(recipe)
    recipe.head.check_vocabulary(spec.vocab_size)
