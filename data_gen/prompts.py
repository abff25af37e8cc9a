"""Stage 1: read the recipe's sources and write the train, validation and held-out prompts.

    python data_gen/prompts.py [RECIPE] [section.key=value ...]

Finished already, the same command only prints the report, which lies in results/NAME/prompts, too.
"""

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.generation.prompt_report import report_prompts
from drafthead.generation.prompts import make_prompts


def main() -> None:
    recipe, _ = recipe_from_command_line(__doc__)
    report_prompts(recipe, make_prompts(recipe))


if __name__ == "__main__":
    run_recipe(main)
