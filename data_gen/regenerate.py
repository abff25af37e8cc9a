"""Stage 2: the target answers the training and validation prompts.

    python data_gen/regenerate.py [RECIPE] [section.key=value ...]
    python data_gen/regenerate.py --dry-run [RECIPE] ...    answers, tokens, memory, disk, hours, price; nothing is run

An engine of this process answers, or a vLLM server by its URL (responses.server_url, its key in DRAFTHEAD_API_KEY).
Interrupted, the same command continues with the parts that are missing.
"""

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.generation.answer_plan import answer_plan
from drafthead.generation.regenerate import SPLITS, regenerate
from drafthead.generation.response_report import print_responses
from drafthead.stage_plan import AMOUNTS, DRY_RUN, GPU, RATE, assumed_from, print_stage


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, DRY_RUN, RATE, GPU, *AMOUNTS)
    if args.dry_run:
        print_stage(answer_plan(recipe, assumed_from(args)))
        return
    regenerate(recipe)
    print_responses(recipe, SPLITS)


if __name__ == "__main__":
    run_recipe(main)
