"""Stage 2: the target generates the responses to the training and validation prompts.

    python data_gen/regenerate.py [RECIPE] [section.key=value ...]
    python data_gen/regenerate.py --dry-run [RECIPE] ...  responses, tokens, memory, disk; nothing is run
    python data_gen/regenerate.py --workers N [RECIPE] ...  N engines; else one per GPU (or tensor-parallel group)
    python data_gen/regenerate.py --cluster [RECIPE] ...  the same of a Ray cluster

Interrupted, the same command continues with the parts that are missing.
"""

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.engine import running
from drafthead.generation.regenerate import print_responses, regenerate
from drafthead.planning import OPTIONS, dry_run
from drafthead.preflight import preflight


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, *OPTIONS, *running.OPTIONS)
    if args.dry_run:
        dry_run(recipe, args, {"regenerate": args.tokens_per_second})
        return
    preflight(recipe)
    regenerate(recipe, running.runner(args, recipe))
    print_responses(recipe)


if __name__ == "__main__":
    run_recipe(main)
