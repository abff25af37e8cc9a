"""Stage 3: run the target over its own text and store its hidden states.

    python data_gen/harvest.py [RECIPE] [section.key=value ...]
    python data_gen/harvest.py --dry-run [RECIPE] ...    sequences, tokens, bytes, hours and price; nothing is run
    python data_gen/harvest.py --verify [RECIPE] ...     reads a finished store and names what is broken (exit code 1)

Interrupted, the same command continues with the shards that are missing.
"""

import sys

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.generation.estimate import print_estimate
from drafthead.generation.harvest import harvest, print_states
from drafthead.generation.inspect_states import print_verification

OPTIONS = (
    ("--verify", {"action": "store_true", "help": "check every shard of the stores and write nothing"}),
    ("--dry-run", {"action": "store_true", "help": "print what a harvest would cost and run nothing"}),
    (
        "--tokens-per-second",
        {"type": float, "metavar": "RATE", "help": "measured rate of your engine, all GPUs together, for --dry-run"},
    ),
)


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, *OPTIONS)
    if args.verify:
        sys.exit(0 if print_verification(recipe) else 1)
    if args.dry_run:
        print_estimate(recipe, args.tokens_per_second)
        return
    harvest(recipe)
    print_states(recipe)


if __name__ == "__main__":
    run_recipe(main)
