"""`train/eagle3.py --dry-run`: what a run needs on every GPU, before one is taken.

Added up from shapes, not measured: weights and optimiser by ZeRO stage, the frozen pieces of the target, what the
unroll keeps for its backward (see core.remake) and the buffers of the fused loss. Left out: the allocator's slack,
CUDA's own context and NCCL's buffers, so leave a tenth free. A test holds the sum against the memory that one step
really takes on a CPU.

Shapes: T tokens of a micro batch, R of them rows that lead to a loss (at most T), K TTT steps, H hidden, F
feed-forward, Q query and G key/value heads, d head dimension, N taps, D draft and V target vocabulary, P parameters.
"""

from dataclasses import dataclass, fields

import torch

from drafthead.config import Recipe, TrainConfig
from drafthead.core.losses import CHUNK_ROWS
from drafthead.models.draft import DraftModel, DraftShape, draft_shape
from drafthead.models.target import check_tap_ids, load_target_spec

_FLOAT32 = 4


@dataclass(frozen=True)
class Footprint:
    """Bytes on one GPU.

    Attributes:
        weights: in the compute type, and the float32 masters beside them.
        gradients: of all weights, or of a rank's share.
        optimizer: moments, and the moving average.
        target: embeddings, head rows and norm.
        batch: taps and last states of one micro batch, and of the one read ahead.
        activations: kept for the backward.
        loss: logits of a chunk and the head's gradient.
    """

    weights: int
    gradients: int
    optimizer: int
    target: int
    batch: int
    activations: int
    loss: int

    @property
    def total(self) -> int:
        return sum(getattr(self, field.name) for field in fields(self))


def footprint(shape: DraftShape, config: TrainConfig, ranks: int, device: str = "cuda") -> Footprint:
    """Memory of one rank.

    Args:
        shape: of the head.
        config: the recipe's train section.
        ranks: that share the run.
        device: "cuda" or "cpu", whose chunks differ.
    """
    width = 2 if config.precision == "bf16" else _FLOAT32
    parameters, stage = num_parameters(shape), config.zero_stage
    share = parameters // ranks
    moments = 2 + (config.ema_decay is not None)
    H, V, D, tokens = shape.hidden_size, shape.vocab_size, shape.head.draft_vocab_size, config.tokens_per_batch
    masters = 0 if stage == 0 else _FLOAT32 * share
    rows = CHUNK_ROWS[device]
    teacher_rows = rows // config.num_ttt_steps
    return Footprint(
        weights=width * (share if stage == 3 else parameters) + masters,
        gradients=width * (share if stage >= 2 else parameters),
        optimizer=moments * _FLOAT32 * (parameters if stage == 0 else share),
        target=width * (V + D) * H,
        batch=2 * width * tokens * (shape.num_taps + 1) * H,
        activations=width * tokens * _kept_per_row(shape, config),
        loss=rows * D * (_FLOAT32 + (0 if width == _FLOAT32 else width)) + teacher_rows * D * _FLOAT32
        + D * H * _FLOAT32,
    )  # fmt: skip


def num_parameters(shape: DraftShape) -> int:
    """Trainable weights of a head."""
    with torch.device("meta"):
        return sum(p.numel() for p in DraftModel(shape).parameters())


def _kept_per_row(shape: DraftShape, config: TrainConfig) -> int:
    """Elements that the unroll keeps for one row over all TTT steps."""
    head, H = shape.head, shape.hidden_size
    queries, keys = head.num_attention_heads * head.head_dim, head.num_key_value_heads * head.head_dim
    carried = 2 * keys + H  # keys, values and the state after the block: needed by later steps
    inside = 2 * queries + 2 * head.intermediate_size + H  # query, attention's output, gate, up, the state between
    per_layer = carried + (0 if config.gradient_checkpointing else inside)
    results = 3 * H  # a step's normed state, its place in the stack, and its gradient
    reading = queries + 2 * keys + 2 * H  # what embeddings give to q, k and v, and what that was made from
    once = inside if config.gradient_checkpointing else 0
    return config.num_ttt_steps * (head.num_layers * per_layer + results) + reading + once


def print_plan(recipe: Recipe, ranks: int) -> None:
    """Print parameters, memory per GPU and disk of a run; nothing is trained.

    Args:
        recipe: to be trained.
        ranks: GPUs of the run.

    Raises:
        ValueError: the recipe does not fit its target, or micro batches cannot be shared by the ranks.
    """
    if recipe.train.batches_per_step % ranks:
        raise ValueError(
            f"train.batches_per_step {recipe.train.batches_per_step} cannot be shared by {ranks} GPUs: "
            "choose a divisor with --gpus"
        )
    if not recipe.head.draft_vocab_size:
        raise ValueError(
            "head.coverage chooses the draft vocabulary from the answers: add head.draft_vocab_size=32000 "
            "head.coverage=null to plan with a size"
        )
    spec = load_target_spec(recipe.target_path, recipe.target.revision, recipe.target.trust_remote_code)
    check_tap_ids(spec, recipe.target.tap_ids)
    shape = draft_shape(recipe, spec)
    needed, parameters = footprint(shape, recipe.train, ranks), num_parameters(shape)
    print(f"head       {parameters / 1e6:,.1f} M parameters; {recipe.train.batches_per_step // ranks} micro batches of "
          f"{recipe.train.tokens_per_batch:,} tokens on each of {ranks} GPUs are one step")  # fmt: skip
    for field in fields(needed):
        print(f"{field.name:<11}{getattr(needed, field.name) / 2**30:8.2f} GiB")
    print(f"per GPU    {needed.total / 2**30:8.2f} GiB at ZeRO {recipe.train.zero_stage}; leave a tenth free")
    kept = recipe.train.keep_checkpoints + 1  # and the best
    moments = 3 + (recipe.train.ema_decay is not None)
    size = parameters * _FLOAT32 * (1 + moments)
    print(f"disk       {kept * size / 2**30:8.2f} GiB for {kept} checkpoints of {size / 2**30:.2f} GiB")
    print("hours and price: no rate was measured on a GPU; run a few steps, read tokens/s and ETA off the log")
