"""Export a trained head to a directory that vLLM serves.

    python export/head.py [RECIPE] [section.key=value ...] [--checkpoint runs/NAME/checkpoints/step_N]

By default the checkpoint with the best predicted acceptance length is exported.
"""

from pathlib import Path

from drafthead.cli import run_recipe
from drafthead.config import recipe_from_command_line


def main() -> None:
    recipe, args = recipe_from_command_line(
        __doc__, ("--checkpoint", {"type": Path, "help": "a checkpoint other than the best"})
    )
    from drafthead.exporting.head import export_head

    export_head(recipe, args.checkpoint)


if __name__ == "__main__":
    run_recipe(main)
