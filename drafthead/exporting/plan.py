"""`export/head.py --dry-run`: what writing and checking a head will take."""

from drafthead.config import Recipe
from drafthead.drafters.eagle3.model import num_parameters, planned_shape
from drafthead.engine.engine_plan import EnginePlan
from drafthead.engine.rates import start_seconds
from drafthead.exporting.check import PROMPTS
from drafthead.stage_plan import Assumed, StagePlan

_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 2}  # fp8 halves some matrices only


def export_plan(recipe: Recipe, assumed: Assumed) -> StagePlan:
    """One file, and one engine that answers some validation prompts with it.

    Raises:
        FileNotFoundError: the target's config.json is missing.
        ValueError: the recipe does not fit it.
    """
    shape = planned_shape(recipe)
    written = num_parameters(shape) * _BYTES[recipe.export.dtype] + 8 * shape.head.draft_vocab_size + shape.vocab_size
    engine, start = EnginePlan(recipe, assumed, written), start_seconds(recipe)
    length = recipe.engine.max_model_len
    prompts = min(PROMPTS, recipe.prompts.validation)
    return StagePlan(
        stage="export",
        work=f"a head in {recipe.export.dtype}, {prompts} answers to check it",
        gpus=engine.gpus,
        memory_bytes=engine.memory_bytes(length, 1),
        disk_bytes=written,
        hours=start.seconds / 3600,
        rate=f"one start of {start}",
        price_per_gpu_hour=recipe.eval.price_per_gpu_hour,
    )
