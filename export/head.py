"""Export a trained head to a directory that vLLM serves.

    python export/head.py [RECIPE] [section.key=value ...] [--checkpoint runs/NAME/checkpoints/step_N]
                          [--format vllm|speculators] [--no-serve-check]

By default the checkpoint with the best predicted acceptance length is exported. The directory is reloaded, served in
vLLM and compared with the checkpoint's own prediction before it gets its name; --no-serve-check leaves vLLM out.
--format speculators (or export.format=speculators) writes heads/NAME-speculators, which `vllm serve` starts without
being told the target.
"""

from pathlib import Path

from drafthead.cli import run_recipe
from drafthead.config import recipe_from_command_line


def main() -> None:
    recipe, args = recipe_from_command_line(
        __doc__,
        ("--checkpoint", {"type": Path, "help": "a checkpoint other than the best"}),
        ("--format", {"choices": ["vllm", "speculators"], "help": "instead of the recipe's export.format"}),
        ("--no-serve-check", {"action": "store_true", "help": "do not start vLLM to compare acceptance"}),
    )
    if args.format:
        recipe = recipe.model_copy(update={"export": recipe.export.model_copy(update={"format": args.format})})
    from drafthead.exporting.head import export_head

    export_head(recipe, args.checkpoint, serve_check=not args.no_serve_check)


if __name__ == "__main__":
    run_recipe(main)
