"""The report of a head: the verdict on the terminal; report.html, report.md and PNGs in results/NAME.

python eval/report.py [RECIPE] [section.key=value ...]

Made from the rows in results/NAME, so it can be made again with other prices, traffic or service levels.
"""

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.evaluation.decision.analysis import analyse
from drafthead.evaluation.reporting.report import build_report, print_brief, tracked, write_pages
from drafthead.tracking import log_results


def main() -> None:
    recipe, _ = recipe_from_command_line(__doc__)
    analysis = analyse(recipe)
    page = write_pages(build_report(recipe, analysis), recipe.results_dir)
    print_brief(recipe, analysis)
    log_results(recipe, tracked(analysis), page)
    print(f"\nReport: {page} (every table as text: {page.with_suffix('.md').name})")


if __name__ == "__main__":
    run_recipe(main)
