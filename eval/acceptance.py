"""Acceptance length, rate and losslessness of a head on held-out prompts, beside other methods of drafting.

python eval/acceptance.py [RECIPE] [section.key=value ...]
python eval/acceptance.py --workers N [RECIPE] ...    N engines; else one per GPU (or tensor-parallel group)
"""

from drafthead.cli import NO_TABLES, recipe_from_command_line, run_recipe
from drafthead.engine.running import WORKERS, node_engines
from drafthead.evaluation.measuring.acceptance import conditions, measure_acceptance, read_acceptance, read_conditions
from drafthead.evaluation.reporting.measured_tables import acceptance_table, conditions_table, places_table
from drafthead.evaluation.reporting.tables import print_table
from drafthead.evaluation.results.summary import summarise_acceptance, summarise_conditions
from drafthead.evaluation.workload import method_names


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, WORKERS, NO_TABLES)
    directory = measure_acceptance(recipe, node_engines(recipe.engine.tensor_parallel_size, args.workers))
    if args.no_tables:
        return
    summary, names = summarise_acceptance(read_acceptance(directory)), method_names(recipe)
    for table in filter(None, (acceptance_table(summary, names), places_table(summary.places, names))):
        print_table(table)
    if not all(condition.main for condition in conditions(recipe)):
        print_table(conditions_table(summarise_conditions(read_conditions(directory)), names))


if __name__ == "__main__":
    run_recipe(main)
