"""Stage 3: run the target over its own text and store its hidden states.

    python data_gen/harvest.py [RECIPE] [section.key=value ...]

Interrupted, the same command continues with the shards that are missing.
"""

from drafthead.cli import run_recipe
from drafthead.config import recipe_from_command_line
from drafthead.generation.harvest import harvest, print_states


def main() -> None:
    recipe, _ = recipe_from_command_line(__doc__)
    harvest(recipe)
    print_states(recipe)


if __name__ == "__main__":
    run_recipe(main)
