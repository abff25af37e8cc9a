"""Stage 3: run the target over its own text and store its hidden states.

    python data_gen/harvest.py [RECIPE] [section.key=value ...]
    python data_gen/harvest.py --dry-run [RECIPE] ...    tokens, memory, disk; nothing is run
    python data_gen/harvest.py --verify [RECIPE] ...     reads a finished store and names what is broken (exit code 1)
    python data_gen/harvest.py --workers N [RECIPE] ...  N engines; else one per GPU (or tensor-parallel group)
    python data_gen/harvest.py --cluster [RECIPE] ...    the same of a Ray cluster

Interrupted, the same command continues with the shards that are missing.
"""

import sys

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.engine import running
from drafthead.generation.harvest import harvest, print_states, print_verification
from drafthead.planning import OPTIONS as PLANNING
from drafthead.planning import dry_run
from drafthead.planning.memory import check_fits
from drafthead.preflight import preflight

OPTIONS = (
    ("--verify", {"action": "store_true", "help": "check every shard of the stores and write nothing"}),
    *PLANNING, *running.OPTIONS,
)  # fmt: skip


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, *OPTIONS)
    if args.verify:
        sys.exit(0 if print_verification(recipe) else 1)
    if args.dry_run:
        dry_run(recipe, args, {"harvest": args.tokens_per_second})
        return
    preflight(recipe)
    check_fits(recipe)
    one_engine = recipe.states.spool_shards is not None  # start the command again for another
    harvest(recipe, running.runner(args, recipe, one_engine))
    print_states(recipe)


if __name__ == "__main__":
    run_recipe(main)
