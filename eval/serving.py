"""Throughput and latency of a head under load, against the same server without it.

python eval/serving.py [RECIPE] [section.key=value ...]
"""

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.evaluation.levels import summarise_serving
from drafthead.evaluation.serving import measure_serving
from drafthead.evaluation.serving_rows import read_serving
from drafthead.evaluation.serving_tables import print_serving


def main() -> None:
    recipe, _ = recipe_from_command_line(__doc__)
    directory = measure_serving(recipe)
    print_serving(summarise_serving(read_serving(directory)))


if __name__ == "__main__":
    run_recipe(main)
