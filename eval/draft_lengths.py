"""A schedule of draft lengths, filled in by the cost model, served by vLLM beside every fixed draft length.

    python eval/draft_lengths.py [RECIPE] 'eval.num_draft_tokens=[3,1]' 'eval.concurrency=[1,32]'

First the fixed lengths are measured, for the cost model, then the schedule beside them, in two blocks of opposite
order; both in results/NAME/draft-lengths. Interrupted, the same command continues. Where the model has one draft length
for every load, that is the answer, and nothing more is served.
"""

import json
from textwrap import indent

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.config import Recipe
from drafthead.config.evaluation import HEAD
from drafthead.engine.server import speculative_flag
from drafthead.evaluation.decision.analysis import compare_schedule, fixed_length
from drafthead.evaluation.decision.variants import (
    SCHEDULED,
    given_schedule,
    measure_schedule,
    modelled_schedule,
    scheduled,
)
from drafthead.evaluation.decision.verdict import DEPLOY, UP_TO
from drafthead.evaluation.reporting.measured_tables import brief_table
from drafthead.evaluation.reporting.tables import print_table
from drafthead.evaluation.results.levels import LoadComparison
from drafthead.evaluation.workload import method_names, speculative_config

OPTIONS = (
    ("--schedule", {"type": json.loads, "metavar": "JSON", "help": "instead of the cost model's: [[1,2,3],[3,64,1]]"}),
)  # fmt: skip


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, *OPTIONS)
    if args.schedule is not None:
        schedule = given_schedule(recipe, args.schedule)
    else:
        schedule, levels = modelled_schedule(recipe)
        if len(schedule) == 1:
            ((_, last, K),) = schedule
            print(
                f"K = {K} at every load: of the lengths that were served, no other is faster by a per cent at any "
                f"batch of 1 to {last} requests. There is no schedule to serve."
            )
            if pays(recipe, levels, K):
                print(f"  {speculative_flag(speculative_config(recipe, HEAD, K))}")
            return
    levels = measure_schedule(recipe, schedule)
    found = compare_schedule(recipe, schedule, levels)
    names = method_names(recipe)
    print_table(brief_table(levels, names))
    by_load = "; ".join(f"at {c} {change.text()}" for c, change in found.by_load.items())
    print(f"\n{found.sentence(names)}. By requests in flight: {by_load or 'unknown'}.")
    print(f"The schedule against no speculation: {found.verdict.headline}.")
    name, K = (HEAD, found.against) if found.rejection_reason else (SCHEDULED, found.verdict.key.K)
    if name == SCHEDULED or pays(recipe, levels, K):
        print(f"  {speculative_flag(speculative_config(recipe, name, K, (scheduled(recipe, schedule),)))}")


def pays(recipe: Recipe, levels: list[LoadComparison], K: int) -> bool:
    """Whether a fixed draft length is to be served at all; prints the verdict."""
    verdict = fixed_length(recipe, levels, K)
    print(f"K = {verdict.key.K} against no speculation: {verdict.headline}\n{indent(verdict.reason, '  ')}")
    return verdict.decision in (DEPLOY, UP_TO)


if __name__ == "__main__":
    run_recipe(main)
