"""The draft head's transformer block, one TTT step at a time.

Module names are those of the exported file, so export is a copy. The first block multiplies its q, k and v
weights with cat(embedding, feature). What the left half gives depends on the token alone, and a token is read
by all K steps, each from another index: `DraftLayer.read` forms those products once and every step adds the
right half to them. Of the products of a block that spares K - 1 of K halves of q, k and v.

Shapes: T tokens of a packed batch, R rows that lead to a loss (see drafters.layout), H hidden, Q query and G
key/value heads, D head dimension, K TTT steps.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafthead.config import HeadConfig
from drafthead.drafters.eagle3.attention import ttt_attention
from drafthead.drafters.layout import Layout
from drafthead.drafters.recompute import gated, rms_norm
from drafthead.drafters.rope import rotate


class RMSNorm(nn.Module):
    """Root-mean-square norm with float32 statistics (float64 for float64 inputs)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        return rms_norm(states, self.weight, self.eps)


class Projection(nn.Linear):
    """A product without bias, of all input features or a run of them, on top of what other features gave."""

    def __init__(self, size: int, out: int):
        super().__init__(size, out, bias=False)

    def forward(self, states: Tensor, features: slice = slice(None), base: Tensor | None = None) -> Tensor:
        """states (R, n) with the n columns `features` of the weight, added to base (R, out)."""
        weight = self.weight[:, features].T
        return states @ weight if base is None else torch.addmm(base, states, weight)


@dataclass(frozen=True)
class Reading:
    """What token embeddings give to queries, keys and values.

    Attributes:
        query: (T, Q * D), or (R, Q * D) where only the rows have queries.
        key: (T, G * D).
        value: (T, G * D).
    """

    query: Tensor
    key: Tensor
    value: Tensor

    def of_rows(self, rows: Tensor) -> "Reading":
        """Those of the rows, (R, ...)."""
        return Reading(*(t if len(t) == len(rows) else t[rows] for t in (self.query, self.key, self.value)))

    def ahead(self, offset: int) -> "Reading":
        """Entry t + offset at index t. What wraps around at the end is read past a document's end, and is moot."""
        return Reading(*(torch.roll(t, -offset, 0) for t in (self.query, self.key, self.value)))


@dataclass(frozen=True)
class Past:
    """Keys and values of the TTT steps so far in one layer, rotated: step 0 (T, G, D), later steps (R, G, D)."""

    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()

    def extended(self, key: Tensor, value: Tensor) -> "Past":
        """With one more step. A new object, so that a checkpointed step can be run again."""
        return Past((*self.keys, key), (*self.values, value))


@dataclass(frozen=True)
class Step:
    """What one layer computes in one TTT step.

    Attributes:
        rope: cos and sin of the positions given.
        queries: (R,) which of them go on, or None for all.
        cu_queries: (S + 1,) document boundaries among those.
        cu_keys: (S + 1,) document boundaries among the step-0 keys.
        longest: most queries and most step-0 keys of a document.
    """

    rope: tuple[Tensor, Tensor]
    queries: Tensor | None
    cu_queries: Tensor
    cu_keys: Tensor
    longest: tuple[int, int]

    def select(self, states: Tensor) -> Tensor:
        """The positions that go on."""
        return states if self.queries is None else states[self.queries]


class Attention(nn.Module):
    """Grouped-query attention whose keys and values of earlier TTT steps are kept by the caller."""

    def __init__(self, head: HeadConfig, size: int, reads: bool):
        super().__init__()
        width, kv_width = head.num_attention_heads * head.head_dim, head.num_key_value_heads * head.head_dim
        self.head_dim = head.head_dim
        self.embedded = slice(0, size if reads else 0)  # features of the input that come from embeddings
        self.states = slice(self.embedded.stop, None)
        inputs = size + self.embedded.stop
        self.q_proj, self.k_proj, self.v_proj = (Projection(inputs, out) for out in (width, kv_width, kv_width))
        self.o_proj = Projection(width, size)

    def read(self, embeddings: Tensor, rows: Tensor | None) -> Reading:
        """The left half of the input's products; queries for the rows only, or for all where rows is None."""
        asking = embeddings if rows is None else embeddings[rows]
        return Reading(*(
            projection(states, self.embedded)
            for projection, states in ((self.q_proj, asking), (self.k_proj, embeddings), (self.v_proj, embeddings))
        ))  # fmt: skip

    def forward(self, states: Tensor, step: Step, past: Past, reading: Reading | None) -> tuple[Tensor, Past]:
        """Keys and values of every position given, queries and output of `step.queries` among them."""
        query, key, value = (reading.query, reading.key, reading.value) if reading else (None, None, None)
        heads = (-1, self.head_dim)
        key = rotate(self.k_proj(states, self.states, key).unflatten(-1, heads), *step.rope)
        past = past.extended(key, self.v_proj(states, self.states, value).unflatten(-1, heads))
        query = self.q_proj(step.select(states), self.states, query).unflatten(-1, heads)
        query = rotate(query, *map(step.select, step.rope))
        mixed = ttt_attention(query, past.keys, past.values, step.cu_queries, step.cu_keys, step.longest)
        return self.o_proj(mixed.flatten(1)), past


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = Projection(hidden_size, intermediate_size)
        self.up_proj = Projection(hidden_size, intermediate_size)
        self.down_proj = Projection(intermediate_size, hidden_size)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(states), self.up_proj(states)))


class DraftLayer(nn.Module):
    """A Llama block. The first one reads cat(embedding, feature); further ones read the state alone."""

    def __init__(self, head: HeadConfig, size: int, eps: float, first: bool):
        super().__init__()
        self.norm_before_residual = head.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps) if first else None
        self.self_attn = Attention(head, size, reads=first)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, head.intermediate_size)

    def read(self, embeddings: Tensor, layout: Layout, only_layer: bool) -> tuple[Reading, Reading]:
        """What the first layer takes from the embeddings (T, H): in step 0, and of the rows in later steps."""
        rows = layout.rows if only_layer and len(layout.rows) < len(embeddings) else None
        first = self.self_attn.read(self.input_layernorm(embeddings), rows)
        return first, first.of_rows(layout.rows)

    def forward(self, state: Tensor, step: Step, past: Past, reading: Reading | None) -> tuple[Tensor, Past]:
        """The state after the block, (R, H), and the past with this step's keys and values."""
        residual = state
        if self.hidden_norm is None:
            normed = self.input_layernorm(state)
        else:
            normed = self.hidden_norm(state)
            residual = normed if self.norm_before_residual else state
        attended, past = self.self_attn(normed, step, past, reading)
        state = step.select(residual) + attended
        return state + self.mlp(self.post_attention_layernorm(state)), past
