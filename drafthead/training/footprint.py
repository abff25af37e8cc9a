"""`train/eagle3.py --dry-run`: what a run needs on every GPU, before one is taken.

Added up from shapes, not measured: weights and optimiser by ZeRO stage, the frozen pieces of the target, what the
unroll keeps for its backward (drafters.recompute) and the buffers of the fused loss. Left out: the allocator's slack,
CUDA's own context and NCCL's buffers, so leave a tenth free. A test holds the sum against the memory that one step
really takes on a CPU.

Shapes: T tokens of a micro batch, R of them rows that lead to a loss (at most T), K TTT steps, H hidden, F
feed-forward, Q query and G key/value heads, d head dimension, N aux layers, D draft and V target vocabulary, P weights.
"""

from dataclasses import dataclass, fields

from drafthead.config import TrainConfig
from drafthead.drafters.base import DraftShape, num_parameters
from drafthead.losses.fused import CHUNK_ROWS

_FLOAT32 = 4


@dataclass(frozen=True)
class Footprint:
    """Bytes on one GPU.

    Attributes:
        weights: in the compute type, and the float32 masters beside them.
        gradients: of all weights, or of a rank's share.
        optimizer: moments, and the moving average.
        target: embeddings, head rows and norm.
        batch: aux layers and last states of one micro batch, and of the one read ahead.
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
    teacher_rows = rows // shape.head.num_positions
    return Footprint(
        weights=width * (share if stage == 3 else parameters) + masters,
        gradients=width * (share if stage >= 2 else parameters),
        optimizer=moments * _FLOAT32 * (parameters if stage == 0 else share),
        target=width * (V + D) * H,
        batch=2 * width * tokens * (shape.num_aux_layers + 1) * H,
        activations=width * tokens * _kept_per_row(shape, config),
        loss=rows * D * (_FLOAT32 + (0 if width == _FLOAT32 else width)) + teacher_rows * D * _FLOAT32
        + D * H * _FLOAT32,
    )  # fmt: skip


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
    return shape.head.num_positions * (head.num_layers * per_layer + results) + reading + once
