"""Before stage 1: the target writes prompts itself, for a recipe without data (Magpie, arXiv 2406.08464).

    python data_gen/self_prompts.py [RECIPE] --number N [section.key=value ...]
    python data_gen/self_prompts.py --workers 2 ...      N engines; else one per GPU (or tensor-parallel group)
    python data_gen/self_prompts.py --cluster ...        the same of a Ray cluster

Writes data/NAME/self-prompts/prompts.jsonl, which the recipe names as a source (docs/prompts.md). Interrupted, the same
command continues; a larger number goes on from the samples that are there.
"""

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.engine import running
from drafthead.generation.self_prompts import print_self_prompts, write_self_prompts

NUMBER = ("--number", {"type": int, "required": True, "metavar": "N", "help": "prompts to write"})


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, NUMBER, *running.OPTIONS)
    print_self_prompts(recipe, write_self_prompts(recipe, args.number, running.runner(args, recipe)))


if __name__ == "__main__":
    run_recipe(main)
