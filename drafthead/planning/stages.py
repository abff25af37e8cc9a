"""The plan of every stage: tokens, bytes on disk, memory per GPU, and hours where the user gave a rate.

Exact once the responses exist, and an upper bound before (planning.lengths).
Shapes: T tokens, R rows that can carry loss, H hidden, N aux layers.
"""

import shutil
from collections.abc import Sequence

from drafthead.artifacts import MANIFEST, read_manifest
from drafthead.config import Recipe
from drafthead.data.prompts import read_prompts
from drafthead.drafters.base import num_parameters, planned_shape
from drafthead.evaluation.measuring.acceptance import by_engine, conditions
from drafthead.evaluation.measuring.plan import recipe_plan
from drafthead.exporting.check import PROMPTS
from drafthead.generation.regenerate import is_regenerated
from drafthead.planning import Assumed, StagePlan, size_text
from drafthead.planning.harvest_cache import refusal
from drafthead.planning.lengths import (
    SequenceLength,
    SplitLengths,
    all_lengths,
    length_notes,
    planned,
)  # fmt: skip
from drafthead.planning.memory import EngineMemory, training_memory
from drafthead.target.pieces import TargetSpec, captured_ids, check_aux_layer_ids, compute_dtype, load_target_spec

_RESPONSE_BYTES = 8  # of a token in responses: its id and its text, before Parquet packs them
_REQUEST_BYTES = 8_000  # of a request in the results, its response's ids included
_HEAD_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 2}  # of a weight; fp8 halves some matrices only
_FLOAT32 = 4


# ---- Data ----


def prompts_plan(recipe: Recipe, assumed: Assumed) -> StagePlan:
    """Drawing prompts takes no GPU, and minutes."""
    drawn = (recipe.prompts_dir / MANIFEST).exists()
    conversations = assumed.prompts or planned(recipe.prompts, "train")
    count = len(read_prompts(recipe.prompts_dir, "train")) if drawn else conversations
    notes = [] if drawn else ["disk: without the data sets that are downloaded"]
    text_bytes = 5 * assumed.prompt_tokens * count  # about five characters a token
    return StagePlan("prompts", f"{count:,} conversations to train on", disk_bytes=text_bytes, notes=notes)


def regenerate_plan(recipe: Recipe, assumed: Assumed, lengths: list[SplitLengths] | None = None) -> StagePlan:
    """One engine that responds to the prompts; a rate is of generated tokens, reading the prompts included.

    Args:
        recipe: nothing on disk is needed but the target's config.json.
        assumed: where prompts or responses do not exist yet.
        lengths: of both splits, where the caller has them.

    Raises:
        FileNotFoundError: the target's config.json is missing.
        ValueError: the recipe does not fit it.
    """
    _spec(recipe)
    lengths = lengths or all_lengths(recipe, assumed)
    regenerated = [one for one in lengths if is_regenerated(recipe, one.split)]
    sequences = sum(len(one.sequences) for one in regenerated)
    generated, tokens = sum(one.generated for one in regenerated), sum(one.tokens for one in regenerated)
    engine, mean = EngineMemory(recipe, assumed.gpu_memory_gib), tokens / max(sequences, 1)
    notes = [*length_notes(recipe, lengths, assumed), *engine.notes(mean)]
    if url := recipe.responses.server_url:
        notes.append(f"the GPUs are those of the server at {url}")
    return StagePlan(
        stage="regenerate",
        work=f"{sequences:,} responses, {generated:,} tokens after {tokens - generated:,} of prompts",
        gpus=engine.gpus,
        memory_bytes=engine.bytes(mean, engine.under_way(mean)),
        disk_bytes=_RESPONSE_BYTES * sum(one.tokens for one in lengths),
        hours=assumed.hours(generated),
        notes=notes,
    )


def harvest_plan(recipe: Recipe, assumed: Assumed, lengths: list[SplitLengths] | None = None) -> StagePlan:
    """Both splits as one stage: engines on `assumed.gpus` GPUs share the shards; a rate is one engine's.

    Raises:
        FileNotFoundError: the target's config.json is missing.
        ValueError: the recipe does not fit it, or the GPUs are no multiple of engine.tensor_parallel_size.
    """
    spec, lengths = _spec(recipe), lengths or all_lengths(recipe, assumed)
    too_large = refusal(recipe, assumed.gpu_memory_gib)
    notes, tokens, on_disk = [*([too_large] if too_large else []), *length_notes(recipe, lengths, assumed)], 0, 0
    for one in lengths:
        again = one.split == "train" and recipe.states.spool_shards is not None  # every epoch is harvested anew
        passes, size = recipe.train.epochs if again else 1, states_bytes(recipe, spec, one)
        density = "at once" if again else f"({size / max(one.tokens, 1):,.0f} bytes per token)"
        notes.append(
            f"{one.split}: {len(one.sequences):,} sequences, {one.tokens:,} tokens"
            f"{f' x {passes} epochs' if again else ''}, {size_text(size)} on disk {density} in {recipe.states.format}"
        )
        tokens, on_disk = tokens + one.tokens * passes, on_disk + size
    place = recipe.directory()
    if on_disk > (free := shutil.disk_usage(next(p for p in (place, *place.parents) if p.exists())).free):
        notes.append(
            f"disk: {size_text(free)} free in {place}, {size_text(on_disk - free)} too little; states.format=fp8 "
            "halves the aux layers, states.spool_shards=32 keeps a bounded part (docs/training.md)"
        )
    sequences, boundaries = sum(len(one.sequences) for one in lengths), captured_ids(spec, recipe.target.aux_layer_ids)
    if recipe.states.one_pass and not all(one.exact for one in lengths):
        host = max(_host_bytes(recipe, spec, one, len(boundaries)) for one in lengths)
        notes.append(
            f"states.one_pass: about {size_text(host)} of the host's memory for each engine, until a part is complete; "
            f"lower responses.prompts_per_part {recipe.responses.prompts_per_part} for less"
        )
        work = f"{sequences:,} sequences, captured while the target responds"
        return StagePlan("harvest", work, disk_bytes=on_disk, notes=notes)
    engine = EngineMemory(recipe, assumed.gpu_memory_gib)
    gpus = assumed.gpus or engine.gpus
    if gpus % engine.gpus:
        raise ValueError(f"--gpus {gpus} is no multiple of engine.tensor_parallel_size {engine.gpus}")
    longest = max((length.tokens for one in lengths for length in one.sequences), default=0)
    captured = engine.captured_bytes(len(boundaries), spec.hidden_size)
    notes.append(
        f"memory: weights and one sequence of {longest:,} tokens, {captured / 1024:,.0f} KiB of captured states each; "
        "more is used where there is more"
    )
    return StagePlan(
        stage="harvest",
        work=f"{sequences:,} sequences, {tokens:,} tokens",
        gpus=gpus,
        memory_bytes=engine.bytes(longest, 1) + longest * captured // engine.gpus,
        disk_bytes=on_disk,
        hours=assumed.hours(tokens * engine.gpus / gpus),
        notes=notes,
    )


def states_bytes(recipe: Recipe, spec: TargetSpec, lengths: SplitLengths) -> int:
    """Bytes of a split's states on disk at once, but for some kilobytes of header in each shard."""
    size, online = recipe.states.sequences_per_shard, lengths.split == "train" and recipe.states.spool_shards
    starts = range(0, len(lengths.sequences), size)
    shards = [_shard_bytes(recipe, spec, lengths.sequences[start : start + size]) for start in starts]
    return sum(sorted(shards, reverse=True)[:online] if online else shards)


def _shard_bytes(recipe: Recipe, spec: TargetSpec, sequences: Sequence[SequenceLength]) -> int:
    """See data.shard."""
    width = compute_dtype(spec, recipe.target.dtype).itemsize
    layers, fp8 = recipe.target.aux_layer_ids, recipe.states.format == "fp8"
    per_layer = spec.hidden_size + 4 if fp8 else spec.hidden_size * width  # fp8 has a scale per token
    per_token = len(layers) * per_layer + 4 + 1  # with id and mask
    separate = fp8 or spec.num_layers not in layers
    per_row = (spec.hidden_size * width if separate else 0) + 4 + 4  # with argmax and lse
    tokens, rows = sum(one.tokens for one in sequences), sum(one.rows for one in sequences)
    return tokens * per_token + rows * per_row + 16 * (len(sequences) + 1)


def _host_bytes(recipe: Recipe, spec: TargetSpec, lengths: SplitLengths, boundaries: int) -> int:
    """Captured rows of a part of mean length: every boundary of every token, until its responses are judged."""
    width = compute_dtype(spec, recipe.target.dtype).itemsize
    share = min(1.0, recipe.responses.prompts_per_part / max(len(lengths.sequences), 1))
    return round(lengths.tokens * share * boundaries * spec.hidden_size * width)


def _spec(recipe: Recipe) -> TargetSpec:
    spec = load_target_spec(recipe.target_path, recipe.target.revision)
    check_aux_layer_ids(spec, recipe.target.aux_layer_ids)
    return spec


# ---- The head ----


def train_plan(recipe: Recipe, assumed: Assumed, tokens: int | None = None) -> StagePlan:
    """A training run on `assumed.gpus` GPUs, or on one for each micro batch of a step; a rate is the whole run's.

    Args:
        recipe: to be trained.
        assumed: GPUs and rate.
        tokens: of one epoch; None: those of the states, else of the responses, if there are any.

    Raises:
        FileNotFoundError: the target's config.json is missing.
        ValueError: the recipe does not fit its target, or micro batches cannot be shared by the ranks.
    """
    shape, train = planned_shape(recipe), recipe.train
    ranks = assumed.gpus or train.batches_per_step
    if train.batches_per_step % ranks:
        raise ValueError(
            f"train.batches_per_step {train.batches_per_step} cannot be shared by {ranks} GPUs: choose a divisor with "
            "--gpus"
        )
    parts, parameters = training_memory(shape, train, ranks), num_parameters(shape)
    checkpoint = parameters * _FLOAT32 * (4 + (train.ema_decay is not None))  # weights, masters, moments
    tokens = _tokens_on_disk(recipe) if tokens is None else tokens
    seen = f", {tokens * train.epochs:,} tokens in {train.epochs} epochs" if tokens else ""
    notes = [
        f"a step: {train.batches_per_step // ranks} micro batches of {train.tokens_per_batch:,} tokens on each GPU",
        f"memory at ZeRO {train.zero_stage}: " + ", ".join(f"{name} {size_text(n)}" for name, n in parts.items())
        + "; leave a tenth free",
    ]  # fmt: skip
    if recipe.head.coverage is not None:
        notes.append(
            f"head.coverage {recipe.head.coverage} chooses the draft vocabulary from the responses; counted with all "
            "of it, an upper bound: head.coverage=null head.draft_vocab_size=32000 plans with a size"
        )
    return StagePlan(
        stage="train",
        work=f"{parameters / 1e6:,.1f} M parameters{seen}",
        gpus=ranks,
        memory_bytes=sum(parts.values()),
        disk_bytes=(train.keep_checkpoints + 1) * checkpoint,  # and the best
        hours=assumed.hours(tokens * train.epochs) if tokens else None,
        notes=notes,
    )


def _tokens_on_disk(recipe: Recipe) -> int:
    """Of one epoch, from the states or else the responses; 0 before there are any. A spool's manifest has no epoch."""
    stored = () if recipe.states.spool_shards else (recipe.states_dir("train"),)
    for directory in (*stored, recipe.responses_dir("train")):
        if (directory / MANIFEST).exists():
            counts = read_manifest(directory)["counts"]
            return counts["tokens"] if directory in stored else counts["prompt_tokens"] + counts["response_tokens"]
    return 0


def export_plan(recipe: Recipe, assumed: Assumed) -> StagePlan:
    """One file, and one engine that responds to some validation prompts with it.

    Raises:
        FileNotFoundError: the target's config.json is missing.
        ValueError: the recipe does not fit it.
    """
    shape = planned_shape(recipe)
    maps = 8 * shape.head.draft_vocab_size + shape.vocab_size  # d2t and t2d
    written = num_parameters(shape) * _HEAD_BYTES[recipe.export.dtype] + maps
    engine = EngineMemory(recipe, assumed.gpu_memory_gib, written)
    return StagePlan(
        stage="export",
        work=f"a head in {recipe.export.dtype}, {min(PROMPTS, recipe.prompts.validation)} responses to check it",
        gpus=engine.gpus,
        memory_bytes=engine.bytes(recipe.engine.max_model_len, 1),
        disk_bytes=written,
    )


def eval_plan(recipe: Recipe, assumed: Assumed) -> StagePlan:
    """Acceptance and serving; a rate is of generated tokens, with engine.max_num_seqs requests under way.

    Raises:
        FileNotFoundError: the target's config.json is missing.
    """
    settings, servers, found = recipe.eval, recipe_plan(recipe).runs, conditions(recipe)
    prompts = recipe.prompts.max_heldout or planned(recipe.prompts, "heldout", 0)
    if (recipe.prompts_dir / MANIFEST).exists():
        prompts = len(read_prompts(recipe.prompts_dir, "heldout"))
    prompts = prompts or settings.prompts_per_level
    response = min(settings.max_tokens, assumed.response_tokens or settings.max_tokens)
    length = min(assumed.prompt_tokens, recipe.engine.max_model_len - response - 1) + response
    engine = EngineMemory(recipe, assumed.gpu_memory_gib, 2 * num_parameters(planned_shape(recipe)))
    responses = sum(condition.passes * prompts for condition in found)
    levels = [level for server in servers for level in server.levels]
    requests, loads = sum(level.prompts for level in levels), len({level.name for level in levels})
    tokens = responses * response + sum(level.prompts * min(level.max_tokens, response) for level in levels)
    notes = [f"{response:,} tokens a response; {prompts:,} held-out prompts", *engine.notes(length)]
    if assumed.tokens_per_second:
        notes.append(f"hours: {tokens:,} tokens at the full rate; starts and small loads take more, drafting less")
    return StagePlan(
        stage="evaluate",
        work=f"{len(by_engine(found))} engines for {responses:,} responses; "
        f"{sum(not server.endpoint for server in servers)} servers x {loads} loads, {requests:,} requests",
        gpus=engine.gpus,
        memory_bytes=engine.bytes(length, engine.under_way(length)),
        disk_bytes=(responses + requests) * _REQUEST_BYTES,
        hours=assumed.hours(tokens),
        notes=notes,
    )
