"""Stage 1: read the recipe's sources and write the train, validation and held-out prompts.

    python data_gen/prompts.py [RECIPE] [section.key=value ...]

Finished already, the same command only prints what there is.
"""

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.generation.prompts import make_prompts, print_prompts
from drafthead.preflight import preflight


def main() -> None:
    recipe, _ = recipe_from_command_line(__doc__)
    preflight(recipe)
    print_prompts(recipe, make_prompts(recipe))


if __name__ == "__main__":
    run_recipe(main)
