"""The plan of every stage: tokens, bytes on disk, memory per GPU. It refuses what the stage would refuse."""

import shutil
from collections.abc import Iterable
from functools import cached_property

import numpy as np

from drafthead.artifacts import MANIFEST, read_manifest
from drafthead.config import Recipe
from drafthead.drafters.base import draft_shape, num_parameters
from drafthead.generation.running import node_engines
from drafthead.planning import Assumed, StagePlan, size_text
from drafthead.planning.harvest_cache import refusal
from drafthead.planning.lengths import SplitLengths, all_lengths
from drafthead.planning.memory import EngineMemory, training_memory
from drafthead.target.pieces import TargetSpec, captured_ids, check_aux_layer_ids, compute_dtype, load_target_spec

_RESPONSE_BYTES = 8  # of a token in responses: its id and its text, before Parquet packs them
_FLOAT32 = 4


def plan_stages(recipe: Recipe, assumed: Assumed, stages: Iterable[str]) -> list[StagePlan]:
    """The plans of some of the stages "regenerate", "harvest" and "train".

    Args:
        recipe: nothing on disk is needed but the target's config.json.
        assumed: where prompts or responses do not exist yet.
        stages: by name.

    Raises:
        FileNotFoundError: the target's config.json, or the recipe's file of prompts, is missing.
        ValueError: the recipe does not fit its target, or the GPUs cannot share the work.
    """
    planner, plans = _Planner(recipe, assumed), []
    for stage in stages:
        plan: StagePlan = getattr(planner, stage)()
        if plan.memory_bytes > planner.usable_bytes:
            sizes = f"{size_text(plan.memory_bytes)} do not fit the {size_text(planner.usable_bytes)} used of a GPU"
            remedy = "raise engine.tensor_parallel_size, or train.zero_stage with --gpus"
            plan.notes.append(f"{stage}: {sizes} (--gpu-memory-gib); {remedy}")
        plans.append(plan)
    return plans


class _Planner:
    def __init__(self, recipe: Recipe, assumed: Assumed):
        self.recipe, self.assumed = recipe, assumed
        self.spec = load_target_spec(recipe.target_path, recipe.target.revision)
        check_aux_layer_ids(self.spec, recipe.target.aux_layer_ids)
        self.shape = draft_shape(recipe.head, self.spec, recipe.target.aux_layer_ids)
        self.usable_bytes = int(assumed.gpu_memory_gib * 2**30 * recipe.engine.gpu_memory_utilization)

    @cached_property
    def lengths(self) -> list[SplitLengths]:
        """Of the training and the validation split."""
        return all_lengths(self.recipe, self.assumed)

    def regenerate(self) -> StagePlan:
        """Engines with as many sequences of mean length at once as they may have or as fit.

        A rate is one engine's, of generated tokens, reading the prompts included.
        """
        recipe, engine = self.recipe, EngineMemory(self.recipe)
        parts = np.concatenate([one.parts for one in self.lengths if recipe.responses.regenerates(one.split)])
        tokens, generated = int(parts.sum()), int(parts[:, 1:].sum())
        each = engine.cache_bytes(tokens / len(parts))
        at_once = max(1, min(recipe.engine.max_num_seqs, (self.usable_bytes - engine.weight_bytes) // each))
        prompts = tokens - generated
        work = f"{len(parts):,} responses, {generated:,} tokens after {prompts:,} of prompts, {at_once} at once"
        memory, disk = engine.weight_bytes + at_once * each, _RESPONSE_BYTES * tokens
        gpus = self._gpus(engine.gpus)
        return StagePlan("regenerate", work, generated, gpus, memory, disk, gpus // engine.gpus, [self.lengths[0].note])

    def _gpus(self, per_engine: int) -> int:
        """Those given, or those of this machine in groups of one engine."""
        gpus = self.assumed.gpus or per_engine * node_engines(per_engine)
        if gpus % per_engine:
            raise ValueError(f"--gpus {gpus} is no multiple of engine.tensor_parallel_size {per_engine}")
        return gpus

    def harvest(self) -> StagePlan:
        """Both splits as one stage, whose shards the engines share; a rate is one engine's."""
        recipe, engine = self.recipe, EngineMemory(self.recipe)
        too_large = refusal(recipe, self.assumed.gpu_memory_gib)
        notes = [*([too_large] if too_large else []), self.lengths[0].note]
        gpus = self._gpus(engine.gpus)
        tokens = on_disk = 0
        for one in self.lengths:
            spooled = one.split == "train" and recipe.states.spool_shards is not None  # every epoch is harvested anew
            size = states_bytes(recipe, self.spec, one)
            notes.append(f"{one.split}: {one.total:,} tokens, {size_text(size)} on disk in {recipe.states.format}")
            tokens, on_disk = tokens + one.total * (recipe.train.epochs if spooled else 1), on_disk + size
        place = recipe.directory()
        free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
        if on_disk > free:
            notes.append(f"{place}: {size_text(free)} free; states.format=fp8 halves, states.spool_shards=32 bounds it")
        boundaries = len(captured_ids(self.spec, recipe.target.aux_layer_ids))
        longest = max(int(one.tokens.max()) for one in self.lengths)
        captured = longest * engine.captured_bytes(boundaries) // engine.gpus
        notes.append(f"harvest: room for one sequence of {longest:,} tokens, {size_text(captured)} of captured states")
        if recipe.states.one_pass:
            rows = int(self.lengths[0].tokens.mean()) * recipe.responses.prompts_per_part * boundaries
            host = size_text(rows * self.spec.hidden_size * compute_dtype(self.spec, recipe.target.dtype).itemsize)
            notes.append(f"states.one_pass: part of regenerate, {host} of host memory (responses.prompts_per_part)")
        work, memory = f"{tokens:,} tokens", engine.weight_bytes + engine.cache_bytes(longest) + captured
        return StagePlan("harvest", work, tokens, gpus, memory, on_disk, gpus // engine.gpus, notes)

    def train(self) -> StagePlan:
        """On the GPUs that are given, or one for each micro batch of a step; a rate is the whole run's."""
        train = self.recipe.train
        ranks = self.assumed.gpus or train.batches_per_step
        if train.batches_per_step % ranks:
            raise ValueError(
                f"train.batches_per_step {train.batches_per_step} cannot be shared by {ranks} GPUs: choose a divisor "
                "with --gpus"
            )
        parts, parameters = training_memory(self.shape, train, ranks), num_parameters(self.shape)
        notes = ["train: " + ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())]
        states = self.recipe.states_dir("train")
        if (states / MANIFEST).exists():
            tokens = train.epochs * read_manifest(states)["counts"]["tokens"]
        else:
            tokens = train.epochs * self.lengths[0].total
            notes.insert(0, self.lengths[0].note)
        if self.recipe.head.coverage is not None:
            notes.append("head.coverage: counted with the whole vocabulary, an upper bound")
        checkpoint = parameters * _FLOAT32 * (4 + (train.ema_decay is not None))  # weights, masters, moments
        work = f"{parameters / 1e6:,.1f} M parameters, {tokens:,} tokens in {train.epochs} epochs"
        disk = (train.keep_checkpoints + 1) * checkpoint  # and the best
        return StagePlan("train", work, tokens, ranks, sum(parts.values()), disk, notes=notes)


def states_bytes(recipe: Recipe, spec: TargetSpec, lengths: SplitLengths) -> int:
    """Bytes of a split's states on disk at once, but for the header and index of each shard (see data.shard)."""
    width, layers = compute_dtype(spec, recipe.target.dtype).itemsize, recipe.target.aux_layer_ids
    fp8 = recipe.states.format == "fp8"
    per_layer = spec.hidden_size + 4 if fp8 else spec.hidden_size * width  # fp8 has a scale per token
    per_token = len(layers) * per_layer + 4 + 1  # with id and mask
    separate = fp8 or spec.num_layers not in layers
    per_row = (spec.hidden_size * width if separate else 0) + 4 + 4  # with argmax and lse
    sizes = lengths.tokens * per_token + lengths.rows * per_row
    shards = np.add.reduceat(sizes, range(0, len(sizes), recipe.states.sequences_per_shard))
    at_once = recipe.states.spool_shards if lengths.split == "train" else None
    return int(np.sort(shards)[::-1][:at_once].sum())
