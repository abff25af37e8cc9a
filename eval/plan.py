"""Before training: can a draft head pay here, and what acceptance would it need?

    python eval/plan.py [RECIPE] [section.key=value ...] [--measure]

Step times come from eval.concurrency × eval.num_draft_tokens: with --measure from an untrained head of the recipe's
shape, served beside the baseline, otherwise from what eval/serving.py left of an earlier head. On a GPU the untrained
head's drafts are accepted at the assumed length by vLLM itself (synthetic acceptance), so throughput is measured too.
"""

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.evaluation.measuring.serving import measure_serving
from drafthead.evaluation.reporting.plan_report import plan_tables, print_plan, rows_to_plan_from, untrained_recipe
from drafthead.exporting.export import write_untrained

OPTIONS = (
    ("--measure", {"action": "store_true", "help": "serve an untrained head of the recipe's shape first"}),
    ("--acceptance-length", {"type": float, "nargs": "+", "help": "assumed at eval.num_draft_tokens"}),
    ("--training-cost", {"type": float, "help": "of responses, states and training, in the currency of the price"}),
    ("--days", {"type": float, "default": 365.0, "help": "in which that must be earned (default: 365)"}),
)  # fmt: skip


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, *OPTIONS)
    if args.measure:
        untrained = untrained_recipe(recipe, args.acceptance_length)
        write_untrained(untrained)
        measure_serving(untrained)
    plan = plan_tables(recipe, rows_to_plan_from(recipe), args.acceptance_length, args.training_cost, args.days)
    print_plan(plan)


if __name__ == "__main__":
    run_recipe(main)
