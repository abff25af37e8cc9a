"""`train/eagle3.py --dry-run`: memory by part, disk, hours and price of a run, before it holds a GPU.

Operations are those of the matrix products, two per multiply-add and the backward counted twice; norms, softmax and
the optimiser are left out. R rows lead to a loss, T tokens are read, sequences have S tokens:

    R x K x (6 x (block + H x D) + 12 x Q x d x S / 2) + 4 x N x H x H x T + 2 x H x D x R

with the letters of training.footprint and block the weights of the draft's blocks.
"""

from dataclasses import dataclass, fields

from drafthead.config import Recipe
from drafthead.data.responses import KIND as RESPONSES
from drafthead.data.store import KIND as STATES
from drafthead.drafters.base import DraftShape, num_parameters, planned_shape
from drafthead.engine.rates import SHARE, Rate, assumed, gpu_named, known_rate
from drafthead.provenance import MANIFEST, require
from drafthead.stage_plan import Assumed, StagePlan, print_stage
from drafthead.training.footprint import Footprint, footprint

_FLOAT32 = 4


@dataclass(frozen=True)
class TrainAmount:
    """What one epoch reads: sequences, their tokens, and the rows that lead to a loss."""

    sequences: int
    tokens: int
    rows: int


def amount_on_disk(recipe: Recipe) -> TrainAmount | None:
    """From the states, or else from the responses they will be made of; None before there are any."""
    if (recipe.states_dir("train") / MANIFEST).exists() and recipe.states.spool_shards is None:
        counts = require(recipe.states_dir("train"), STATES, "python data_gen/harvest.py RECIPE")["counts"]
        return TrainAmount(counts["sequences"], counts["tokens"], counts["loss_tokens"])
    if (recipe.responses_dir("train") / MANIFEST).exists():
        counts = require(recipe.responses_dir("train"), RESPONSES, "python data_gen/regenerate.py RECIPE")["counts"]
        tokens = counts["prompt_tokens"] + counts["response_tokens"]
        return TrainAmount(counts["responses"], tokens, counts["response_tokens"])
    return None


def train_plan(recipe: Recipe, assumptions: Assumed, amount: TrainAmount | None) -> StagePlan:
    """A run as one stage.

    Args:
        recipe: to be trained.
        assumptions: GPUs of the run (None: one for each micro batch of a step), which GPU, a measured rate.
        amount: of one epoch; None leaves hours and price out.

    Raises:
        FileNotFoundError: the target's config.json is missing.
        ValueError: the recipe does not fit its target, or micro batches cannot be shared by the ranks.
    """
    ranks = _ranks(recipe, assumptions)
    shape = planned_shape(recipe)
    parameters, train = num_parameters(shape), recipe.train
    kept = train.keep_checkpoints + 1  # and the best
    checkpoint = parameters * _FLOAT32 * (4 + (train.ema_decay is not None))  # weights, masters, moments
    rate = _rate(recipe, shape, assumptions, amount, ranks) if amount else None
    tokens = amount.tokens * train.epochs if amount else 0
    seen = f", {tokens:,} tokens in {train.epochs} epochs" if amount else ""
    return StagePlan(
        stage="train",
        work=f"{parameters / 1e6:,.1f} M parameters{seen}",
        gpus=ranks,
        memory_bytes=footprint(shape, train, ranks).total,
        disk_bytes=kept * checkpoint,
        hours=tokens / rate.tokens_per_second / 3600 if rate else None,
        rate=str(rate or ""),
        price_per_gpu_hour=recipe.eval.price_per_gpu_hour,
        notes=(f"memory: ZeRO {train.zero_stage}; leave a tenth free", *_vocabulary_note(recipe)),
    )


def print_plan(recipe: Recipe, assumptions: Assumed) -> None:
    """Print the stage, and below it where the memory goes.

    Raises:
        FileNotFoundError, ValueError: as `train_plan`.
    """
    amount = amount_on_disk(recipe)
    plan = train_plan(recipe, assumptions, amount)
    print_stage(plan)
    print(f"steps      {recipe.train.batches_per_step // plan.gpus} micro batches of {recipe.train.tokens_per_batch:,} "
          f"tokens on each of {plan.gpus} GPUs are one step")  # fmt: skip
    parts = footprint(planned_shape(recipe), recipe.train, plan.gpus)
    for field in fields(Footprint):
        print(f"{field.name:<11}{getattr(parts, field.name) / 2**30:8.2f} GiB")
    if amount is None:
        print("hours and price: there are no answers yet to count; python data_gen/dry_run.py plans with assumed ones")


def _vocabulary_note(recipe: Recipe) -> tuple[str, ...]:
    if recipe.head.coverage is None:
        return ()
    return (
        f"head.coverage {recipe.head.coverage} chooses the draft vocabulary from the answers; counted with all of it, "
        "an upper bound: head.coverage=null head.draft_vocab_size=32000 plans with a size",
    )


def _ranks(recipe: Recipe, assumptions: Assumed) -> int:
    ranks = assumptions.gpus or recipe.train.batches_per_step
    if recipe.train.batches_per_step % ranks:
        raise ValueError(
            f"train.batches_per_step {recipe.train.batches_per_step} cannot be shared by {ranks} GPUs: "
            "choose a divisor with --gpus"
        )
    return ranks


def _rate(recipe: Recipe, shape: DraftShape, assumptions: Assumed, amount: TrainAmount, ranks: int) -> Rate:
    """Tokens per second of the whole run."""
    if known := known_rate(recipe, "train", assumptions.tokens_per_second):
        return known
    gpu = gpu_named(assumptions.gpu)
    operations = operations_per_epoch(shape, recipe.head.num_positions, amount)
    return assumed(SHARE * ranks * gpu.operations * amount.tokens / max(operations, 1), gpu, ranks)


def operations_per_epoch(shape: DraftShape, steps: int, amount: TrainAmount) -> float:
    """By the formula at the top of this module."""
    head, H, D = shape.head, shape.hidden_size, shape.head.draft_vocab_size
    fc = shape.num_aux_layers * H * H
    block = num_parameters(shape) - fc - H * D
    length = amount.tokens / max(amount.sequences, 1)
    attention = 12 * head.num_attention_heads * head.head_dim * length / 2 * head.num_layers
    per_row = steps * (6 * (block + H * D) + attention) + 2 * H * D
    return amount.rows * per_row + 4 * fc * amount.tokens
