"""The report of a head: tables on the terminal, report.html, report.md and PNGs in results/NAME.

python eval/report.py [RECIPE] [section.key=value ...]
"""

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.evaluation.analysis import analyse
from drafthead.evaluation.report import print_report, write_report


def main() -> None:
    verdict_only = ("--verdict-only", {"action": "store_true", "help": "leave out the tables that stand above already"})
    recipe, args = recipe_from_command_line(__doc__, verdict_only)
    analysis = analyse(recipe)
    write_report(recipe, analysis)
    print_report(recipe, analysis, tables=not args.verdict_only)


if __name__ == "__main__":
    run_recipe(main)
