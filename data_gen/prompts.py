"""Stage 1: read the recipe's conversations and write the train, validation and held-out prompts.

    python data_gen/prompts.py [RECIPE] [section.key=value ...]

Finished already, the same command only prints the table.
"""

from drafthead.cli import run_recipe
from drafthead.config import recipe_from_command_line
from drafthead.generation.prompts import make_prompts, print_prompts


def main() -> None:
    recipe, _ = recipe_from_command_line(__doc__)
    manifest = make_prompts(recipe)
    print_prompts(recipe, manifest)


if __name__ == "__main__":
    run_recipe(main)
