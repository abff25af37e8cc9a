"""Stage 2: the target generates the responses to the training and validation prompts.

    python data_gen/regenerate.py [RECIPE] [section.key=value ...]
    python data_gen/regenerate.py --dry-run [RECIPE] ...  responses, tokens, memory, disk; nothing is run
    python data_gen/regenerate.py --cluster [RECIPE] ...  one engine per GPU (or tensor-parallel group) of a Ray cluster

The engine runs in this process, or is a vLLM server by its URL (responses.server_url, its key in DRAFTHEAD_API_KEY).
With states.one_pass the hidden states are captured while the target generates, and stage 3 is done here too.
Interrupted, the same command continues with the parts that are missing.
"""

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.generation import running
from drafthead.generation.harvest import harvest, print_states
from drafthead.generation.regenerate import print_responses, regenerate
from drafthead.planning import AMOUNTS, DRY_RUN, GPU_MEMORY, RATE, assumed_from, print_plans
from drafthead.planning.harvest_cache import check_fits
from drafthead.planning.stages import regenerate_plan

OPTIONS = (DRY_RUN, RATE, GPU_MEMORY, *AMOUNTS, *running.OPTIONS)


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, *OPTIONS)
    if args.dry_run:
        print_plans([regenerate_plan(recipe, assumed_from(args))], recipe.name)
        return
    if recipe.states.one_pass:
        check_fits(recipe)
    run = running.runner(args)
    regenerate(recipe, run)
    print_responses(recipe)
    if recipe.states.one_pass and harvest(recipe, run=run):
        print_states(recipe)


if __name__ == "__main__":
    run_recipe(main)
