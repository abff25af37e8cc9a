"""Export a trained head to a directory that vLLM serves.

    python export/head.py [RECIPE] [section.key=value ...] [--checkpoint runs/NAME/checkpoints/step_N]
                          [--no-serve-check] [--push REPO [--public]]

By default the checkpoint with the best predicted acceptance length is exported. The directory is served in vLLM and
compared with the checkpoint's own prediction before it gets its name; --no-serve-check leaves vLLM out.
export.format=speculators writes heads/NAME-speculators, which `vllm serve` starts without being told the target. A
model card is written beside the weights; once eval/head.py has measured the head, the same command puts the results on
it. Nothing is uploaded without --push.
"""

from pathlib import Path
from typing import Any

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.config import Recipe
from drafthead.preflight import preflight


def main() -> None:
    recipe, args = recipe_from_command_line(
        __doc__,
        ("--checkpoint", {"type": Path, "help": "a checkpoint other than the best"}),
        ("--no-serve-check", {"action": "store_true", "help": "do not start vLLM to compare acceptance"}),
        ("--push", {"metavar": "REPO", "help": "upload to this Hugging Face repository, created private"}),
        ("--public", {"action": "store_true", "help": "with --push: create it public"}),
    )
    preflight(recipe)
    from drafthead.exporting.card import push_head, write_card
    from drafthead.exporting.export import export_head

    directory = export_head(recipe, args.checkpoint, serve_check=not args.no_serve_check)
    print(f"model card: {write_card(recipe, measured_acceptance(recipe), published_as=args.push)}")
    if args.push:
        print(f"pushed: {push_head(directory, args.push, args.public)}")


def measured_acceptance(recipe: Recipe) -> dict[str, Any] | None:
    """Acceptance on held-out prompts, if eval/acceptance.py has finished with exactly this head: the main condition by
    workload, every other one over all prompts; and the longest response in tokens."""
    from drafthead.artifacts import MANIFEST, read_manifest, reference
    from drafthead.config.evaluation import ALL, HEAD
    from drafthead.evaluation.measuring.acceptance import KIND, read_conditions
    from drafthead.evaluation.results.summary import summarise_conditions

    directory = recipe.results_dir / KIND
    if not (directory / MANIFEST).exists():
        return None
    identity = read_manifest(directory)["identity"]
    if identity.get("head") != reference(read_manifest(recipe.head_dir)):
        return None
    of_head = [entry for entry in summarise_conditions(read_conditions(directory)) if entry.method == HEAD]
    shown = [entry for entry in of_head if entry.category == ALL or entry.condition == of_head[0].condition]
    return {"rows": shown, "max_tokens": identity["max_tokens"]}


if __name__ == "__main__":
    run_recipe(main)
