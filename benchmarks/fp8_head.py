"""What draft weights in fp8 cost in acceptance length.

    python benchmarks/fp8_head.py [RECIPE] [section.key=value ...] [--checkpoint CHECKPOINT] [--replay-only]

Takes the recipe's trained head (by default the run's best checkpoint) and judges its weights in bf16 and in fp8 on the
same validation prompts at temperature 0, twice:

- replay: drafting rounds over the target's stored answers with the values that each file holds, in float32. Weights
  alone differ.
- vLLM: the counters of an engine that serves each file. In fp8 it rounds the inputs of the quantised layers as well.
  Prompts that the two engines answered differently are left out: their rounds are not over the same text.

Differences are paired by prompt, with a 95 % bootstrap interval over prompts. One head: how it differs between heads,
the script does not say. Nothing is written beside a temporary directory.
"""

import sys
import tempfile
from pathlib import Path

from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.config import Recipe
from drafthead.drafters.fp8 import as_served
from drafthead.drafters.replay import Acceptance
from drafthead.exporting.check import (
    Document,
    ValidationDocuments,
    paired_difference,
    pooled,
    serve_documents,
)
from drafthead.exporting.export import open_checkpoint, served_shape, write_head
from drafthead.target.pieces import load_target_spec

DTYPES = ("bfloat16", "fp8")
Answer = tuple[list[int], Acceptance]  # response ids and the engine's counters


class Comparison:
    """One trained head with both kinds of weights."""

    def __init__(self, recipe: Recipe, checkpoint: Path | None):
        self.recipe, spec = recipe, load_target_spec(recipe.target_path, recipe.target.revision)
        source = open_checkpoint(recipe, checkpoint, spec)
        self.shape, self.aux_layer_ids = served_shape(source.shape(spec), recipe.export), source.aux_layer_ids
        self.weights, self.name = source.weights(), source.path.name
        self.documents = ValidationDocuments(recipe, prompts=sys.maxsize, tokens=sys.maxsize)

    def replayed(self) -> list[list[Acceptance]]:
        """Counters of every prompt, for each dtype."""
        return [self.documents.rounds(as_served(self.weights, dtype), self.shape) for dtype in DTYPES]

    def served(self, folder: Path) -> list[list[Answer]]:
        """vLLM's answer and counters of every prompt, for each dtype."""
        return [self._serve(folder / dtype, dtype, self.documents.chosen) for dtype in DTYPES]

    def _serve(self, directory: Path, dtype: str, documents: list[Document]) -> list[Answer]:
        export = self.recipe.export.model_copy(update={"dtype": dtype, "format": "vllm"})
        recipe = self.recipe.model_copy(update={"export": export})
        write_head(recipe, directory, self.weights, self.shape, self.aux_layer_ids)
        size = (directory / "model.safetensors").stat().st_size
        print(f"{dtype}: model.safetensors of {size / 2**20:.2f} MiB", file=sys.stderr)
        return serve_documents(recipe, directory, documents, self.shape, self.aux_layer_ids)


def line(name: str, bf16: list[Acceptance], fp8: list[Acceptance]) -> str:
    """A row of the table."""
    found, before, after = paired_difference(fp8, bf16), pooled(bf16), pooled(fp8)
    change = f"{found.value:+.4f} [{found.low:+.4f}, {found.high:+.4f}]"
    return (
        f"| {name} | {len(bf16)} | {before.drafts} | {before.length:.4f} | {after.length:.4f} | {change} | "
        f"{found.value / before.length:+.2%} |"
    )


def main() -> None:
    recipe, args = recipe_from_command_line(
        __doc__,
        ("--checkpoint", {"type": Path, "help": "a checkpoint other than the best"}),
        ("--replay-only", {"action": "store_true", "help": "do not start vLLM"}),
    )
    comparison = Comparison(recipe, args.checkpoint)
    print("| measured by | prompts | rounds in bf16 | bf16 | fp8 | difference [95 %] | relative |")
    print("|---|---|---|---|---|---|---|")
    print(line(f"replay, {comparison.name}", *comparison.replayed()), flush=True)
    if args.replay_only:
        return
    with tempfile.TemporaryDirectory() as folder:
        bf16, fp8 = comparison.served(Path(folder))
    same = [(one, other) for (ids, one), (ids_fp8, other) in zip(bf16, fp8, strict=True) if ids == ids_fp8]
    print(line(f"vLLM, {comparison.name}", [a for a, _ in same], [b for _, b in same]))


if __name__ == "__main__":
    run_recipe(main)
