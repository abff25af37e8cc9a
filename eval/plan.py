"""Before training: can a draft head pay here, and what acceptance would it need?

    python eval/plan.py [RECIPE] [section.key=value ...] [--measure]

Step times come from eval.concurrency × eval.num_draft_tokens: with --measure from an untrained head of the recipe's
shape, served beside the baseline, otherwise from what eval/serving.py left of an earlier head. On a GPU the untrained
head's drafts are accepted at the assumed length by vLLM itself (synthetic acceptance), so throughput is measured too.
"""

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.evaluation.measuring.plan import recipe_plan
from drafthead.evaluation.measuring.serving import KIND, measure_serving
from drafthead.evaluation.reporting.decision_tables import assumed_lengths, plan_tables, rows_to_plan_from
from drafthead.evaluation.reporting.tables import print_table
from drafthead.exporting.export import untrained_recipe, write_untrained

OPTIONS = (
    ("--measure", {"action": "store_true", "help": "serve an untrained head of the recipe's shape first"}),
    ("--acceptance-length", {"type": float, "nargs": "+", "help": "assumed at eval.num_draft_tokens"}),
)


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, *OPTIONS)
    lengths = assumed_lengths(recipe, args.acceptance_length)
    if args.measure:
        untrained = untrained_recipe(recipe, lengths)
        write_untrained(untrained)
        measure_serving(untrained, recipe_plan(untrained), untrained.results_dir / KIND)
    tables, verdict = plan_tables(recipe, *rows_to_plan_from(recipe), lengths)
    for table in tables:
        print_table(table)
    print(f"\n{verdict}")


if __name__ == "__main__":
    run_recipe(main)
