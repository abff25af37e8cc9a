"""A schedule of draft lengths, filled in by the cost model, served by vLLM beside every fixed draft length.

    python eval/draft_lengths.py [RECIPE] 'eval.num_draft_tokens=[3,1]' 'eval.concurrency=[1,32]'

First the fixed lengths are measured, for the cost model, then the schedule beside them, in two blocks of opposite
order; both in results/NAME/draft-lengths. Interrupted, the same command continues. Where the model has one draft length
for every load, that is the answer, and nothing more is served.
"""

import json

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.evaluation.decision.deployment import deployed_config, speculative_flag
from drafthead.evaluation.reporting.schedule_check import (
    check_schedule,
    measure_schedule,
    modelled_schedule,
    settled,
)
from drafthead.evaluation.reporting.tables import print_table
from drafthead.evaluation.workload import HEAD

OPTIONS = (
    ("--schedule", {"type": json.loads, "metavar": "JSON", "help": "instead of the cost model's: [[1,2,3],[3,64,1]]"}),
)  # fmt: skip


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, *OPTIONS)
    schedule = args.schedule or modelled_schedule(recipe)
    if not args.schedule and (answer := settled(recipe, schedule)):
        print(answer)
        return
    print(speculative_flag(deployed_config(recipe, HEAD, max(recipe.eval.draft_tokens), schedule)))
    check = check_schedule(recipe, measure_schedule(recipe, schedule))
    print_table(check.table)
    print(f"\n{check.sentence()}")


if __name__ == "__main__":
    run_recipe(main)
