"""Export a trained head to a directory that vLLM serves.

    python export/head.py [RECIPE] [section.key=value ...] [--checkpoint runs/NAME/checkpoints/step_N]
                          [--no-serve-check]

By default the checkpoint with the best predicted acceptance length is exported. The directory is reloaded, served in
vLLM and compared with the checkpoint's own prediction before it gets its name; --no-serve-check leaves vLLM out.
"""

from pathlib import Path

from drafthead.cli import run_recipe
from drafthead.config import recipe_from_command_line


def main() -> None:
    recipe, args = recipe_from_command_line(
        __doc__,
        ("--checkpoint", {"type": Path, "help": "a checkpoint other than the best"}),
        ("--no-serve-check", {"action": "store_true", "help": "do not start vLLM to compare acceptance"}),
    )
    from drafthead.exporting.head import export_head

    export_head(recipe, args.checkpoint, serve_check=not args.no_serve_check)


if __name__ == "__main__":
    run_recipe(main)
