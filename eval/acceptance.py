"""Acceptance length, rate and losslessness of a head on held-out prompts, beside n-gram drafting.

python eval/acceptance.py [RECIPE] [section.key=value ...]
"""

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.evaluation.acceptance import measure_acceptance, read_acceptance
from drafthead.evaluation.summary import summarise_acceptance
from drafthead.evaluation.tables import print_acceptance


def main() -> None:
    recipe, _ = recipe_from_command_line(__doc__)
    directory = measure_acceptance(recipe)
    print_acceptance(summarise_acceptance(read_acceptance(directory)))


if __name__ == "__main__":
    run_recipe(main)
