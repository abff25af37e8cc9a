"""`harvest.py --dry-run`: what the states of a recipe will cost, before anything is spent.

Sequences, tokens and bytes are exact once the responses exist, and an upper bound before (every answer as long as
responses.max_tokens allows). Hours follow from a rate: yours (`--tokens-per-second`), one that this project measured
on exactly that target, or an assumption that is printed as one (drafthead/engine/rates.py).

Shapes: T tokens, R rows that can carry loss, H hidden, N aux layers.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from drafthead.config import Recipe
from drafthead.engine.engine_plan import EnginePlan, captured_bytes
from drafthead.engine.rates import known_rate
from drafthead.generation.plans.texts import Text, Texts, amount_notes, texts_of
from drafthead.stage_plan import Assumed, StagePlan, print_stage, size_text
from drafthead.target.pieces import TargetSpec, captured_ids, check_aux_layer_ids, compute_dtype, load_target_spec

SPLITS = ("train", "validation")
NOTHING = Assumed()


@dataclass(frozen=True)
class Estimate:
    """What one split costs.

    Attributes:
        split: "train" or "validation".
        exact: whether the responses exist; otherwise everything is an upper bound.
        sequences, tokens: to be stored, of one epoch.
        passes: how often they are harvested; a spool harvests every epoch anew.
        disk_bytes: on disk at once.
        kept_bytes: of host memory, about, in which an engine keeps states until a part is answered.
    """

    split: str
    exact: bool
    sequences: int
    tokens: int
    passes: int
    disk_bytes: int
    kept_bytes: int = 0


def estimate(recipe: Recipe, assumed: Assumed = NOTHING, found: Sequence[Texts] | None = None) -> list[Estimate]:
    """The cost of both splits; no model is loaded and nothing is written.

    Raises:
        FileNotFoundError: the target is missing.
        ValueError: an aux layer lies beyond the target.
    """
    spec = _spec(recipe)
    found = found or [texts_of(recipe, split, assumed) for split in SPLITS]
    return [_estimate_split(recipe, spec, one) for one in found]


def _spec(recipe: Recipe) -> TargetSpec:
    spec = load_target_spec(recipe.target_path, recipe.target.revision)
    check_aux_layer_ids(spec, recipe.target.aux_layer_ids)
    return spec


def _estimate_split(recipe: Recipe, spec: TargetSpec, found: Texts) -> Estimate:
    texts, size = found.texts, recipe.states.sequences_per_shard
    shards = [stored_bytes(recipe, spec, texts[start : start + size]) for start in range(0, len(texts), size)]
    online = found.split == "train" and recipe.states.spool_shards is not None
    at_once = sorted(shards, reverse=True)[: recipe.states.spool_shards] if online else shards
    passes = recipe.train.epochs if online else 1
    kept = _kept_bytes(recipe, spec, found) if recipe.states.one_pass and not found.exact else 0
    return Estimate(found.split, found.exact, len(texts), found.tokens, passes, sum(at_once), kept)


def _kept_bytes(recipe: Recipe, spec: TargetSpec, found: Texts) -> int:
    """Captured rows of a part of mean length: every boundary of every token, until its answers have been judged."""
    boundaries = len(captured_ids(spec, recipe.target.aux_layer_ids))
    width = compute_dtype(spec, recipe.target.dtype).itemsize
    share = min(1.0, recipe.responses.prompts_per_part / max(len(found.texts), 1))
    return round(found.tokens * share * boundaries * spec.hidden_size * width)


def stored_bytes(recipe: Recipe, spec: TargetSpec, texts: Sequence[Text]) -> int:
    """Size of the shard that holds these texts, but for its header of some kilobytes (see data.shard)."""
    width = compute_dtype(spec, recipe.target.dtype).itemsize
    layers, fp8 = recipe.target.aux_layer_ids, recipe.states.format == "fp8"
    per_tap = spec.hidden_size + 4 if fp8 else spec.hidden_size * width
    per_token = len(layers) * per_tap + 4 + 1  # with id and mask
    separate = fp8 or spec.num_layers not in layers
    per_row = (spec.hidden_size * width if separate else 0) + 4 + 4  # with argmax and lse
    tokens, rows = sum(text.tokens for text in texts), sum(text.rows for text in texts)
    return tokens * per_token + rows * per_row + 16 * (len(texts) + 1)


def harvest_plan(recipe: Recipe, assumed: Assumed, found: list[Texts] | None = None) -> StagePlan:
    """Both splits as one stage: engines on `assumed.gpus` GPUs share the shards.

    Args:
        recipe: to be harvested.
        assumed: a rate in it is one engine's.
        found: the texts, where the caller has them.

    Raises:
        ValueError: the GPUs are no multiple of engine.tensor_parallel_size.
    """
    spec, found = _spec(recipe), found or [texts_of(recipe, split, assumed) for split in SPLITS]
    splits, engine = estimate(recipe, assumed, found), EnginePlan(recipe, assumed)
    if kept := max(one.kept_bytes for one in splits):
        return _one_pass_plan(recipe, splits, kept)
    tokens = sum(one.tokens * one.passes for one in splits)
    rate = known_rate(recipe, "harvest", assumed.tokens_per_second) or engine.prefill()
    gpus = assumed.gpus or engine.gpus
    if gpus % engine.gpus:
        raise ValueError(f"--gpus {gpus} is no multiple of engine.tensor_parallel_size {engine.gpus}")
    longest = max((text.tokens for one in found for text in one.texts), default=0)
    captured = captured_bytes(engine.size, len(captured_ids(spec, recipe.target.aux_layer_ids)), spec.hidden_size)
    bound = "" if all(one.exact for one in splits) or assumed.answer_tokens else "at most "
    return StagePlan(
        stage="harvest",
        work=f"{sum(one.sequences for one in splits):,} sequences, {bound}{tokens:,} tokens",
        gpus=gpus,
        memory_bytes=engine.memory_bytes(longest, 1) + longest * captured // engine.gpus,
        disk_bytes=sum(one.disk_bytes for one in splits),
        hours=tokens / rate.tokens_per_second / 3600 * engine.gpus / gpus,
        rate=f"{rate}" + (f", {gpus // engine.gpus} engines" if gpus > engine.gpus else ""),
        price_per_gpu_hour=recipe.eval.price_per_gpu_hour,
        notes=(
            *amount_notes(recipe, found[0], assumed),
            f"memory: weights and one sequence of {longest:,} tokens, {captured / 1024:,.0f} KiB of captured states "
            "each; more is used where there is more",
            *_space_note(recipe, sum(one.disk_bytes for one in splits)),
        ),
    )


def _one_pass_plan(recipe: Recipe, splits: Sequence[Estimate], kept: int) -> StagePlan:
    """Regeneration has the GPUs and the hours; what is left is disk, and memory of the host."""
    disk = sum(one.disk_bytes for one in splits)
    return StagePlan(
        stage="harvest",
        work=f"{sum(one.sequences for one in splits):,} sequences, captured while the target answers",
        disk_bytes=disk,
        notes=(
            f"states.one_pass: about {size_text(kept)} of the host's memory for each engine, until a part is answered; "
            f"lower responses.prompts_per_part {recipe.responses.prompts_per_part} for less",
            *_space_note(recipe, disk),
        ),
    )


def print_estimate(recipe: Recipe, assumed: Assumed) -> None:
    """Print the estimate of a recipe: a line per split, and the stage's plan."""
    found = [texts_of(recipe, split, assumed) for split in SPLITS]
    splits = estimate(recipe, assumed, found)
    for one in splits:
        bound = "" if one.exact or assumed.answer_tokens else "at most "
        again = f" x {one.passes} epochs" if one.passes > 1 else ""
        per_token = one.disk_bytes / max(one.tokens, 1)
        density = f" ({per_token:,.0f} bytes per token in {recipe.states.format})" if one.passes == 1 else " at once"
        print(
            f"{one.split:<10} {one.sequences:,} sequences, {bound}{one.tokens:,} tokens{again}, "
            f"{bound}{size_text(one.disk_bytes)} on disk{density}"
        )
    print_stage(harvest_plan(recipe, assumed, found))


def _space_note(recipe: Recipe, wanted: int) -> tuple[str, ...]:
    if wanted <= (free := _free_bytes(recipe.directory())):
        return ()
    return (
        f"disk: {size_text(free)} free in {recipe.directory()}, {size_text(wanted - free)} too little; "
        "states.format=fp8 halves the aux layers, states.spool_shards=32 keeps a bounded part (docs/training.md)",
    )


def _free_bytes(directory: Path) -> int:
    """Free space where a directory is or will be."""
    return shutil.disk_usage(next(p for p in (directory, *directory.parents) if p.exists())).free
