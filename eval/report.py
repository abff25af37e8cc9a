"""The report of a head: tables on the terminal, report.html, report.md and PNGs in results/NAME.

python eval/report.py [RECIPE] [section.key=value ...]
"""

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.evaluation.report import print_report, write_report


def main() -> None:
    recipe, _ = recipe_from_command_line(__doc__)
    write_report(recipe)
    print_report(recipe)


if __name__ == "__main__":
    run_recipe(main)
