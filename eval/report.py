"""The report of a head: tables on the terminal; report.html, report.md, PNGs and results.parquet in results/NAME.

    python eval/report.py [RECIPE] [section.key=value ...]
    python eval/report.py --from results.parquet [section.key=value ...]

results.parquet holds every row of the evaluation with its recipe: with --from the report is made again beside it, on
any machine, with other prices, traffic or service levels if overrides say so.
"""

from pathlib import Path

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.evaluation.decision.analysis import analyse, read_results
from drafthead.evaluation.reporting.report import print_brief, print_report, tracked, write_report
from drafthead.evaluation.results.one_file import read_one_file
from drafthead.tracking import log_results

OPTIONS = (
    ("--from", {"type": Path, "dest": "file", "metavar": "FILE", "help": "one Parquet file instead of a recipe"}),
    ("--brief", {"action": "store_true", "help": "one table and the verdict on the terminal; all of it in the report"}),
)


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, *OPTIONS)
    results = read_one_file(args.file, args.overrides) if args.file else read_results(recipe)
    analysis = analyse(results)
    page = write_report(results, analysis, args.file.parent if args.file else recipe.results_dir)
    (print_brief if args.brief else print_report)(results.recipe, analysis)
    if not args.file:
        log_results(results.recipe, tracked(analysis), page)
    print(f"\nReport: {page} (every table as text: {page.with_suffix('.md').name})")


if __name__ == "__main__":
    run_recipe(main)
