"""The dry runs of the stages that take long in one table: GPUs, memory per GPU, disk, and hours where a rate is given.

    python data_gen/dry_run.py [RECIPE] [section.key=value ...]
                               [--prompts N] [--prompt-tokens N] [--response-tokens N] [--gpus N] [--gpu-memory-gib N]

Of the target only config.json is needed. What exists already is counted; what does not is assumed, and the lines below
the table say which is which. Hours come from rates that you measured, such as --harvest-rate 20000 (tokens per second
of one engine, or of the whole training); a stage without one has none.
"""

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.planning import AMOUNTS, dry_run, positive

STAGES = ("regenerate", "harvest", "train", "acceptance")
RATES = tuple(
    (f"--{stage}-rate", {"type": positive, "metavar": "RATE", "help": f"measured tokens per second of {stage}"})
    for stage in STAGES
)


def main() -> None:
    recipe, args = recipe_from_command_line(__doc__, *AMOUNTS, *RATES)
    dry_run(recipe, args, {stage: getattr(args, f"{stage}_rate") for stage in STAGES})


if __name__ == "__main__":
    run_recipe(main)
