"""Train a draft model on harvested hidden states: EAGLE-3, or another that `head.type` names.

    accelerate launch train/eagle3.py [RECIPE] [section.key=value ...]
    python train/eagle3.py --dry-run [--gpus N] [RECIPE] ...    memory per GPU, disk; nothing is trained

Without a recipe it trains the embedded default, configs/tiny.yaml. DeepSpeed is on by the recipe: no
accelerate or DeepSpeed configuration file is needed. Interrupted, it resumes from the newest checkpoint.
"""

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.planning import OPTIONS, dry_run
from drafthead.preflight import check_launcher, preflight
from drafthead.processes import end_with_launcher


def main() -> None:
    end_with_launcher()
    recipe, args = recipe_from_command_line(__doc__, *OPTIONS)
    if args.dry_run:
        dry_run(recipe, args, {"train": args.tokens_per_second})
        return
    check_launcher()
    preflight(recipe)
    from drafthead.training.trainer import train

    train(recipe)


if __name__ == "__main__":
    run_recipe(main)
