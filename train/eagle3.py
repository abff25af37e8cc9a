"""Train an EAGLE-3 draft head on harvested hidden states.

    accelerate launch train/eagle3.py [RECIPE] [section.key=value ...]

Without a recipe it trains the embedded default, configs/tiny.yaml. DeepSpeed is on by the recipe: no
accelerate or DeepSpeed configuration file is needed. Interrupted, it resumes from the newest checkpoint.
"""

from drafthead.cli import run_recipe
from drafthead.config import recipe_from_command_line


def main() -> None:
    recipe, _ = recipe_from_command_line(__doc__)
    from drafthead.training.loop import train

    train(recipe)


if __name__ == "__main__":
    run_recipe(main)
