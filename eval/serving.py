"""Throughput and latency of a head under load, against the same server without it.

    python eval/serving.py [RECIPE] [section.key=value ...]
    python eval/serving.py --preset redhat [--miniature] [RECIPE] [section.key=value ...]

A preset repeats a published experiment and ends in a report of its own, results/NAME/PRESET/report.html; --plan shows
what would run and stops.

A server that fails, by now and in an earlier command, is left out of a measurement that has others: the report names
it, and the exit code is 3.
"""

import sys

from drafthead.artifacts import MANIFEST, read_manifest
from drafthead.cli import LEFT_OUT, NO_TABLES, recipe_from_command_line, run_recipe
from drafthead.evaluation.measuring.plan import recipe_plan
from drafthead.evaluation.measuring.presets import load_preset, preset_names, preset_plan
from drafthead.evaluation.measuring.serving import left_out, measure_serving
from drafthead.evaluation.reporting.measured_tables import brief_table, plan_table
from drafthead.evaluation.reporting.report import write_preset_report
from drafthead.evaluation.reporting.tables import print_table
from drafthead.evaluation.results.levels import read_serving, summarise_serving
from drafthead.evaluation.workload import method_names

FLAGS = (
    ("--preset", {"choices": preset_names(), "help": "repeat a published experiment"}),
    ("--miniature", {"action": "store_true", "help": "the preset at the size of the embedded target"}),
    ("--plan", {"action": "store_true", "help": "show servers and loads, and stop"}),
    NO_TABLES,
)


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, *FLAGS)
    if args.miniature and not args.preset:
        raise ValueError(f"--miniature is the size of a preset: give one with --preset, of {', '.join(preset_names())}")
    preset = load_preset(args.preset) if args.preset else None
    plan = preset_plan(recipe, preset, args.miniature) if preset else recipe_plan(recipe)
    if preset or args.plan:
        print_table(plan_table(plan, method_names(recipe), preset))
    if args.plan:
        if not plan.runs:  # a table without a row is not printed
            print("Nothing of it can be run: " + "; ".join(plan.skipped))
        return
    folder = "-".join(filter(None, (args.preset, "miniature" if args.miniature else "")))
    directory = recipe.results_dir / "-".join(filter(None, ("serving", folder)))
    measure_serving(recipe, plan, directory, leave_out=True)
    if preset:
        page = write_preset_report(recipe, preset, plan, directory, recipe.results_dir / folder)
        print(f"\nReport: {page} (every table as text: {page.with_suffix('.md').name})")
    elif not args.no_tables:
        print_table(brief_table(summarise_serving(read_serving(directory)), method_names(recipe)))
    if lost := left_out(read_manifest(directory)):
        print("\nNot measured, as they failed whenever they were tried:", *lost, sep="\n  ")
        print(f"Delete {directory / MANIFEST}, and the same command tries them once more.", flush=True)
        sys.exit(LEFT_OUT)


if __name__ == "__main__":
    run_recipe(main)
