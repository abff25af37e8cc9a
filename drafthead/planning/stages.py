"""The plans of the stages that take long: tokens, bytes on disk, memory per GPU. What does not fit is a note.

Tokens are those of the responses once they exist. Before, the lengths of a prompt and of its response are given on the
command line; a response has no more tokens than the recipe allows.
"""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass

from drafthead.artifacts import MANIFEST, read_manifest
from drafthead.config import Recipe
from drafthead.data.prompts import read_prompts
from drafthead.data.responses import SPLITS
from drafthead.drafters.base import draft_shape, num_parameters
from drafthead.engine.running import node_engines
from drafthead.evaluation.measuring.acceptance import conditions
from drafthead.generation.dialogue import continuation
from drafthead.generation.prompts import planned_prompts
from drafthead.generation.regenerate import list_parts
from drafthead.planning import DEFAULT_PROMPTS, Assumed, StagePlan, size_text
from drafthead.planning.memory import EngineMemory, refusal, training_memory
from drafthead.target.pieces import compute_dtype
from drafthead.target.spec import TargetSpec, recipe_spec
from drafthead.training.accelerator import accumulation_steps

_RESPONSE_BYTES = 8  # of a token in responses: its id and its text, before Parquet packs them
_BF16, _FLOAT32 = 2, 4
_HELDOUT = 2_400  # as many as configs/gpt-oss-120b.yaml holds out


@dataclass(frozen=True)
class Amount:
    """The sequences of a split, and their tokens in all.

    Attributes:
        sequences: number of sequences, one for each response.
        prompt: number of tokens of all prompts.
        generated: tokens of all responses, with what is generated past their stop.
        note: assumption that the numbers rest on; empty once the responses exist.
    """

    sequences: int
    prompt: int
    generated: int
    note: str = ""

    @property
    def tokens(self) -> int:
        return self.prompt + self.generated


def amount_of(recipe: Recipe, split: str, assumed: Assumed) -> Amount:
    """Of the "train" or the "validation" split.

    Raises:
        ValueError: the recipe leaves no prompt to train on.
    """
    after = continuation(recipe.head, split)
    if (recipe.responses_dir(split) / MANIFEST).exists():
        counts = read_manifest(recipe.responses_dir(split))["counts"]
        generated = counts["response_tokens"] + counts["responses"] * after
        return Amount(counts["responses"], counts["prompt_tokens"], generated)
    if (recipe.prompts_dir / MANIFEST).exists():
        sequences = sum(part.size for part in list_parts(recipe, split))
    else:
        planned = planned_prompts(recipe.prompts) | ({"train": assumed.prompts} if assumed.prompts else {})
        if not (sequences := planned.get(split, DEFAULT_PROMPTS)):
            raise ValueError(
                f"prompts.validation {recipe.prompts.validation} leaves no prompt to train on: lower it, or raise the "
                "`train` numbers of sources"
            )
    room = recipe.engine.max_model_len - 1 - after
    response = min(assumed.response_tokens, recipe.responses.max_tokens, room - 1)
    prompt = min(assumed.prompt_tokens, room - response)
    note = f"no responses yet: {prompt:,} tokens of a prompt and {response:,} of a response are assumed (--prompts, "
    note += "--prompt-tokens, --response-tokens)"
    return Amount(sequences, sequences * prompt, sequences * (response + after), note)


def plan_stages(recipe: Recipe, assumed: Assumed, stages: Iterable[str]) -> list[StagePlan]:
    """The plans of some of the stages "regenerate", "harvest", "train" and "acceptance".

    Args:
        recipe: recipe to plan; of its files only the target's config.json is needed.
        assumed: numbers to assume where prompts or responses do not exist yet.
        stages: plans of the stages, by name.

    Raises:
        FileNotFoundError: the target's config.json is missing.
        ValueError: the recipe does not fit its target, or the GPUs cannot share the work.
    """
    planner = _Planner(recipe, assumed)
    plans: list[StagePlan] = [getattr(planner, stage)() for stage in stages]
    for plan in plans:
        if plan.memory_bytes > planner.usable_bytes:
            sizes = f"{size_text(plan.memory_bytes)} do not fit the {size_text(planner.usable_bytes)} used of a GPU"
            remedy = "raise engine.tensor_parallel_size, or train.zero_stage with --gpus"
            plan.notes.append(f"{plan.stage}: {sizes} (--gpu-memory-gib); {remedy}")
    return plans


class _Planner:
    def __init__(self, recipe: Recipe, assumed: Assumed):
        self.recipe, self.assumed = recipe, assumed
        self.spec = recipe_spec(recipe)
        self.amounts = {split: amount_of(recipe, split, assumed) for split in SPLITS}
        self.usable_bytes = int(assumed.gpu_memory_gib * 2**30 * recipe.engine.gpu_memory_utilization)

    def regenerate(self) -> StagePlan:
        """A response to every prompt that has none."""
        amounts = [amount for split, amount in self.amounts.items() if self.recipe.responses.regenerates(split)]
        sequences, prompts, generated = (sum(getattr(one, n) for one in amounts) for n in (
            "sequences", "prompt", "generated"))  # fmt: skip
        return self._answering("regenerate", Amount(sequences, prompts, generated, self.amounts["train"].note))

    def acceptance(self) -> StagePlan:
        """Responses to the held-out prompts under every condition, as long as those of the training prompts."""
        recipe, like, note = self.recipe, self.amounts["train"], ""
        if (recipe.prompts_dir / MANIFEST).exists():
            prompts = len(read_prompts(recipe.prompts_dir, "heldout"))
        elif (prompts := planned_prompts(recipe.prompts).get("heldout", 0)) == 0:
            prompts = _HELDOUT
            note = f"acceptance: {prompts:,} held-out prompts are assumed until they are drawn (prompts.max_heldout)"
        sequences = prompts * sum(condition.passes for condition in conditions(recipe))
        response = min(like.generated // like.sequences, recipe.eval.max_tokens)
        amount = Amount(sequences, sequences * like.prompt // like.sequences, sequences * response, note)
        head = _BF16 * num_parameters(draft_shape(recipe.head, self.spec, recipe.target.aux_layer_ids))
        return self._answering("acceptance", amount, head // recipe.engine.tensor_parallel_size)

    def _answering(self, stage: str, amount: Amount, more_bytes: int = 0) -> StagePlan:
        """Engines with as many sequences of mean length at once as they may have or as fit.

        A rate is one engine's, of generated tokens, reading the prompts included.

        Args:
            stage: name of the stage.
            amount: sequences and tokens that are read and generated.
            more_bytes: bytes of further weights on each GPU.
        """
        engine = EngineMemory(self.recipe)
        each, weights = engine.cache_bytes(amount.tokens / amount.sequences), engine.weight_bytes + more_bytes
        at_once = max(1, min(self.recipe.engine.max_num_seqs, (self.usable_bytes - weights) // each))
        work = f"{amount.sequences:,} responses, {amount.generated:,} tokens after {amount.prompt:,} of prompts"
        work += f", {at_once} at once"
        memory, disk, gpus = weights + at_once * each, _RESPONSE_BYTES * amount.tokens, self._gpus(engine.gpus)
        return StagePlan(stage, work, amount.generated, gpus, memory, disk, gpus // engine.gpus, [amount.note])

    def _gpus(self, per_engine: int) -> int:
        """Those given, or those of this machine in groups of one engine."""
        gpus = self.assumed.gpus or per_engine * node_engines(per_engine)
        if gpus % per_engine:
            raise ValueError(f"--gpus {gpus} is no multiple of engine.tensor_parallel_size {per_engine}")
        return gpus

    def harvest(self) -> StagePlan:
        """Both splits as one stage, whose shards the engines share; a rate is one engine's."""
        recipe, engine, train = self.recipe, EngineMemory(self.recipe), self.amounts["train"]
        notes = [refusal(recipe, self.assumed.gpu_memory_gib) or "", train.note]
        gpus = self._gpus(engine.gpus)
        tokens = on_disk = 0
        for split, amount in self.amounts.items():
            size, epochs = states_bytes(recipe, self.spec, amount, split), 1
            if split == "train" and recipe.states.spool_shards:  # few shards at once, every epoch harvested anew
                at_once = min(recipe.states.spool_shards * recipe.states.sequences_per_shard, amount.sequences)
                size, epochs = size * at_once // amount.sequences, recipe.train.epochs
            notes.append(f"{split}: {amount.tokens:,} tokens, {size_text(size)} on disk")
            tokens, on_disk = tokens + amount.tokens * epochs, on_disk + size
        place = recipe.directory()
        free = shutil.disk_usage(next(path for path in (place, *place.parents) if path.exists())).free
        if on_disk > free:
            halves = "" if recipe.states.format == "fp8" else "states.format=fp8 halves, "
            notes.append(f"{place}: {size_text(free)} free; {halves}states.spool_shards=32 bounds it")
        memory = engine.weight_bytes + engine.request_bytes
        return StagePlan("harvest", f"{tokens:,} tokens", tokens, gpus, memory, on_disk, gpus // engine.gpus, notes)

    def train(self) -> StagePlan:
        """On the GPUs that are given, or one for each micro batch of a step; a rate is the whole run's."""
        train, amount = self.recipe.train, self.amounts["train"]
        ranks = self.assumed.gpus or train.batches_per_step
        accumulation_steps(train, ranks)  # refuses ranks that cannot share a step
        shape = draft_shape(self.recipe.head, self.spec, self.recipe.target.aux_layer_ids)
        parameters = num_parameters(shape)
        parts = training_memory(shape, train, ranks, longest=self.recipe.engine.max_model_len)
        notes = [amount.note, "train: " + ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())]
        if self.recipe.head.coverage is not None:
            notes.append("head.coverage: counted with the whole vocabulary, an upper bound")
        checkpoint = parameters * _FLOAT32 * 5  # weights twice, masters, moments
        tokens = train.epochs * amount.tokens
        work = f"{parameters / 1e6:,.1f} M parameters, {tokens:,} tokens in {train.epochs} epochs"
        disk = (train.keep_checkpoints + 1) * checkpoint  # and the best
        return StagePlan("train", work, tokens, ranks, sum(parts.values()), disk, notes=notes)


def states_bytes(recipe: Recipe, spec: TargetSpec, amount: Amount, split: str) -> int:
    """Bytes of a split's states on disk, but for the header and index of each shard (see data.shard)."""
    width, layers = compute_dtype(spec, recipe.target.dtype).itemsize, recipe.target.aux_layer_ids
    fp8 = recipe.states.format == "fp8"
    per_layer = spec.hidden_size + 4 if fp8 else spec.hidden_size * width  # fp8 has a scale per token
    per_token = len(layers) * per_layer + 4 + 1  # with id and mask
    separate = fp8 or spec.num_layers not in layers
    per_row = (spec.hidden_size * width if separate else 0) + 4 + 4  # with argmax and lse
    # Teachers: from one before the first token that is learned on.
    learned = round(recipe.states.learned_share(split) * amount.prompt)
    rows = min(amount.tokens, amount.generated + amount.sequences + learned)
    return amount.tokens * per_token + rows * per_row
