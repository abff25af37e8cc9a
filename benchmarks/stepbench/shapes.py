"""The shapes that are measured, and how many floating-point operations one optimiser step of each takes.

Operations are those of the matrix products, two per multiply-add, the backward counted as twice the forward.
They are those of a plain unroll, for every contestant: what a trainer recomputes to save memory does not
count, and ours is not charged less for forming the embeddings' half of q, k and v once for all TTT steps.
Norms, softmax and the optimiser are left out.
All R = B x T rows count at every step, although the last ones of a document predict past its end: that is
at most (K + 1) / T of them. Attention of TTT step k reads (T + 1) / 2 step-0 keys on average and k of the
row's own.

    per row      6 x (MACs of a block + H x D) x K   block: q, k, v, o, gate, up, down
                 12 x Q x d x ((T + 1) / 2 x K + K (K - 1) / 2)     scores and weighted sum
    per token    6 x N x H x H, less the gradient of fc's input: 4 x N x H x H
                 2 x H x D for the target's logits, once for all steps

Letters: B batch, T tokens of a document, H hidden, F feed-forward, Q and G query and key/value heads, d
head dimension, N aux layers, D draft vocabulary, V target vocabulary, K TTT steps.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One measured shape.

    Attributes:
        name: name of the shape in `--shape`.
        hidden: H.
        intermediate: F.
        heads: Q.
        kv_heads: G.
        head_dim: d.
        aux layers: N.
        vocab: V.
        draft_vocab: D.
        tokens: T.
        batch: B documents of T tokens.
        ttt_steps: K.
        dtype: compute type of weights and states.
        device: device that the shape is meant for.
        eps: epsilon of every RMS norm, the target's too.
    """

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    draft_vocab: int
    tokens: int
    batch: int
    ttt_steps: int = 7
    layers: int = 3
    dtype: str = "float32"
    device: str = "cpu"
    eps: float = 1e-5

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimiser step."""
        return self.batch * self.tokens


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("cpu", 512, 1376, 8, 8, 64, vocab=32768, draft_vocab=16384, tokens=1024, batch=2),
        Shape(
            "gpt-oss-120b", 2880, 17280, 64, 8, 64, vocab=201088, draft_vocab=32000, tokens=4096, batch=1,
            dtype="bfloat16", device="cuda",
        ),
        Shape(
            "smollm2-135m", 576, 1536, 9, 3, 64, vocab=49152, draft_vocab=16384, tokens=256, batch=8, ttt_steps=4,
            dtype="bfloat16",
        ),
        Shape("tiny", 32, 64, 4, 2, 8, vocab=96, draft_vocab=48, tokens=24, batch=2, ttt_steps=3),
    )
}  # fmt: skip


def block_macs(shape: Shape) -> int:
    """Multiply-adds of the draft block's weights for one row."""
    attention = 2 * shape.hidden * (shape.heads + 2 * shape.kv_heads) * shape.head_dim
    output = shape.heads * shape.head_dim * shape.hidden
    return attention + output + 3 * shape.hidden * shape.intermediate


def attention_macs(shape: Shape) -> float:
    """Multiply-adds of scores and weighted sums of one row, over all TTT steps."""
    K, keys = shape.ttt_steps, (shape.tokens + 1) / 2
    return 2 * shape.heads * shape.head_dim * (keys * K + K * (K - 1) / 2)


def step_flops(shape: Shape) -> float:
    """Floating-point operations of one optimiser step; see the module's formula."""
    H, D = shape.hidden, shape.draft_vocab
    rows = 6 * (block_macs(shape) + H * D) * shape.ttt_steps + 6 * attention_macs(shape)
    fc, teacher = 4 * shape.layers * H * H, 2 * H * D
    return shape.tokens_per_step * (rows + fc + teacher)


def parameters(shape: Shape) -> int:
    """Trainable parameters, norms left out."""
    return block_macs(shape) + shape.layers * shape.hidden**2 + shape.hidden * shape.draft_vocab
