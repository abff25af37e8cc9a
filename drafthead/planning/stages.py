"""The plan of every stage: tokens, bytes on disk, memory per GPU, and hours where the user gave a rate.

Sequences, tokens and bytes are exact once the responses exist. Before, they follow from the prompts, or from the
recipe and the command line: an upper bound, as every response is counted with the length that the recipe allows.

Shapes: T tokens, R rows that can carry loss, H hidden, N aux layers.
"""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from drafthead.config import PromptsConfig, PromptSource, Recipe
from drafthead.data.prompts import read_prompts
from drafthead.data.reading import Said
from drafthead.data.responses import KIND as RESPONSES
from drafthead.data.responses import iter_responses
from drafthead.data.store import KIND as STATES
from drafthead.drafters.eagle3.model import num_parameters, planned_shape
from drafthead.evaluation.measuring.conditions import by_engine, conditions
from drafthead.evaluation.measuring.plan import recipe_plan
from drafthead.exporting.answers import PROMPTS
from drafthead.generation.prompts.mix import PRESETS
from drafthead.generation.responses.asking import Request, continuation, prepare
from drafthead.generation.responses.dialogue import open_dialogue
from drafthead.generation.responses.keeping import Keeper
from drafthead.generation.responses.regenerate import SPLITS, is_answered
from drafthead.planning.form import DEFAULT_PROMPTS, Assumed, StagePlan, size_text
from drafthead.planning.memory import EngineMemory, training_memory
from drafthead.progress import progress_bar
from drafthead.provenance import MANIFEST, require
from drafthead.target.pieces import TargetSpec, captured_ids, check_aux_layer_ids, compute_dtype, load_target_spec
from drafthead.target.tokenizer import load_tokenizer

_RESPONSE_BYTES = 8  # of a token in responses: its id and its text, before Parquet packs them
_REQUEST_BYTES = 8_000  # of a request in the results, its response's ids included
_HEAD_BYTES = {"float32": 4, "bfloat16": 2, "fp8": 2}  # of a weight; fp8 halves some matrices only
_FLOAT32 = 4


# ---- How long sequences are -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SequenceLength:
    """Tokens before the response, of the response, and after it."""

    prompt: int
    response: int
    continuation: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.response + self.continuation

    @property
    def rows(self) -> int:
        """Rows that can carry loss: from two before the first generated token on (see drafters.layout)."""
        return self.response + self.continuation + min(self.prompt, 2) if self.response else 0


@dataclass(frozen=True)
class SplitLengths:
    """The sequences of a split, and what their lengths were taken from."""

    split: str
    sequences: Sequence[SequenceLength]
    source: Literal["responses", "prompts", "recipe"]

    @property
    def exact(self) -> bool:
        return self.source == "responses"

    @property
    def tokens(self) -> int:
        return sum(one.tokens for one in self.sequences)

    @property
    def generated(self) -> int:
        """Tokens that the target generates."""
        return sum(one.response + one.continuation for one in self.sequences)


def all_lengths(recipe: Recipe, assumed: Assumed) -> list[SplitLengths]:
    """Of the training and the validation split."""
    return [split_lengths(recipe, split, assumed) for split in SPLITS]


def split_lengths(recipe: Recipe, split: str, assumed: Assumed) -> SplitLengths:
    """The sequences of "train" or "validation", as well as they are known."""
    if (recipe.responses_dir(split) / MANIFEST).exists():
        stored = iter_responses(recipe.responses_dir(split))
        found = [SequenceLength(len(r.prompt_ids), len(r.response_ids), len(r.continuation_ids)) for r in stored]
        return SplitLengths(split, found, "responses")
    if (recipe.prompts_dir / MANIFEST).exists():
        return SplitLengths(split, _from_prompts(recipe, split, assumed), "prompts")
    after = continuation(recipe, split)
    response = min(assumed.response_tokens or recipe.responses.max_tokens, recipe.responses.max_tokens)
    prompt = min(assumed.prompt_tokens, recipe.engine.max_model_len - 1 - after - response)
    settings = recipe.prompts
    count = settings.validation if split == "validation" else assumed.prompts or planned_prompts(settings)
    return SplitLengths(split, [SequenceLength(prompt, response, after)] * count, "recipe")


def planned_prompts(settings: PromptsConfig) -> int:
    """Training conversations of a recipe whose prompts are not drawn yet; DEFAULT_PROMPTS where it gives no number."""
    amounts = [
        source.train if source.train is not None else sum((source.categories or {}).values())
        for source in planned_sources(settings)
        if source.weight is None
    ]
    counted = int(sum(amounts)) - settings.validation  # which is drawn from them
    known = [count for count in (counted, settings.max_train) if count and count > 0]
    return min(known, default=DEFAULT_PROMPTS)


def planned_sources(settings: PromptsConfig) -> Sequence[PromptSource]:
    """The sources of a mix or a preset; none of a file of prompts."""
    return PRESETS[settings.preset] if settings.preset else settings.sources or ()


def _from_prompts(recipe: Recipe, split: str, assumed: Assumed) -> list[SequenceLength]:
    """With the data's own responses, or with responses as long as there is room for."""
    tokenizer, prompts = load_tokenizer(recipe, templated=True), read_prompts(recipe.prompts_dir, split)
    if not is_answered(recipe, split):
        with progress_bar(len(prompts), "reading responses", "prompt") as bar:
            kept, _ = Keeper(recipe, tokenizer).keep(prompts, bar)
        return [SequenceLength(len(response.prompt_ids), len(response.response_ids)) for response in kept]
    found: list[SequenceLength] = []
    dialogues = [open_dialogue(prompt, recipe.responses.turn_by_turn) for prompt in prompts]
    while dialogues:
        requests, _ = prepare(recipe, tokenizer, split, dialogues)
        found += [_longest(recipe, split, request, assumed) for request in requests]
        # Responses of full length are counted above; one word stands for them in what is rendered.
        dialogues = [later for request in requests if (later := request.dialogue.after(Said("yes")))]
    return found


def _longest(recipe: Recipe, split: str, request: Request, assumed: Assumed) -> SequenceLength:
    """A turn with the longest responses before it that the engine has room for."""
    after = continuation(recipe, split)
    response = min(request.max_tokens, assumed.response_tokens or request.max_tokens)
    room = recipe.engine.max_model_len - 1 - after - response
    earlier = request.dialogue.turn * (assumed.response_tokens or recipe.responses.max_tokens)
    return SequenceLength(min(len(request.prompt_ids) + earlier, room), response, after)


def _length_notes(recipe: Recipe, lengths: Sequence[SplitLengths], assumed: Assumed) -> list[str]:
    """What was assumed, a sentence each; nothing once the responses exist."""
    train, found = lengths[0], []
    if train.source == "recipe":
        found.append(
            f"no prompts yet: {len(train.sequences):,} of {train.sequences[0].prompt:,} tokens with one response each "
            "(--prompts, --prompt-tokens)"
        )
    if not train.exact:
        longest = assumed.response_tokens or recipe.responses.max_tokens
        bound = "" if assumed.response_tokens else "responses.max_tokens, an upper bound: "
        found.append(f"no responses yet: each counted with {bound}{longest:,} tokens (--response-tokens)")
    return found


# ---- Data -----------------------------------------------------------------------------------------------------------


def prompts_plan(recipe: Recipe, assumed: Assumed) -> StagePlan:
    """Drawing prompts takes no GPU, and minutes."""
    drawn = (recipe.prompts_dir / MANIFEST).exists()
    planned = assumed.prompts or planned_prompts(recipe.prompts)
    count = len(read_prompts(recipe.prompts_dir, "train")) if drawn else planned
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
    regenerated = [one for one in lengths if is_answered(recipe, one.split)]
    sequences = sum(len(one.sequences) for one in regenerated)
    generated, tokens = sum(one.generated for one in regenerated), sum(one.tokens for one in regenerated)
    engine, mean = EngineMemory(recipe, assumed.gpu_memory_gib), tokens / max(sequences, 1)
    notes = [*_length_notes(recipe, lengths, assumed), *engine.notes(mean)]
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
    notes, tokens, on_disk = _length_notes(recipe, lengths, assumed), 0, 0
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


# ---- The head -------------------------------------------------------------------------------------------------------


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
    """Of one epoch; 0 before there are states or responses."""
    if (recipe.states_dir("train") / MANIFEST).exists() and recipe.states.spool_shards is None:
        return require(recipe.states_dir("train"), STATES, "python data_gen/harvest.py RECIPE")["counts"]["tokens"]
    if (recipe.responses_dir("train") / MANIFEST).exists():
        counts = require(recipe.responses_dir("train"), RESPONSES, "python data_gen/regenerate.py RECIPE")["counts"]
        return counts["prompt_tokens"] + counts["response_tokens"]
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
    prompts = recipe.prompts.max_heldout or sum(source.heldout for source in planned_sources(recipe.prompts))
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
