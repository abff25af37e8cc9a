"""The EAGLE-3 draft model: one small transformer that reads the target's aux hidden states, unrolled over K TTT steps.

Module and parameter names are those of the exported file (`fc`, `midlayer`, `norm`, `lm_head`, ...), so export is a
copy. The embedding is the target's and frozen: it is passed in, not owned. Only dense Llama blocks exist, which is what
serving engines accept; for a sparse draft the engine's model class would have to change first.

The first block multiplies its q, k and v weights with cat(embedding, feature). What the left half gives depends on the
token alone, and a token is read by all K steps, each from another index: `DraftLayer.project` forms those products once
and every step adds the right half to them. Of the products of a block that spares K - 1 of K halves of q, k and v.

Shapes: T tokens of a packed batch, R rows that lead to a loss (see drafters.batch), H hidden, N aux layers, Q query and
G key/value heads, d head dimension, K TTT steps, D draft vocabulary, V target vocabulary.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafthead.drafters.attention import Documents, draft_attention
from drafthead.drafters.base import Drafter, DraftModule, DraftShape
from drafthead.drafters.batch import Layout, PackedBatch
from drafthead.drafters.eagle3.config import Eagle3Head, EagleHead
from drafthead.drafters.eagle3.vllm import Eagle3Files
from drafthead.drafters.layers import MLP, Projection, RMSNorm, Rotary, by_head, rotate
from drafthead.drafters.recompute import recomputing, trim_heap

# What token embeddings give to queries (T, Q * D), or (R, Q * D) where only the rows have them, keys and values
# (T, G * D).
Projections = tuple[Tensor, ...]
# Keys, rotated, and values of the TTT steps so far in one layer: step 0 (T, G, D), later steps (R, G, D) each. Never
# changed in place, so that a checkpointed step can be run again.
KeyValueCache = tuple[tuple[Tensor, Tensor], ...]


def of_rows(cache: KeyValueCache, chosen: Tensor) -> KeyValueCache:
    """With the entries of later steps of some rows only."""
    first, *later = cache
    return first, *((key.index_select(0, chosen), value.index_select(0, chosen)) for key, value in later)


def feature_error(state: Tensor, feature: Tensor) -> Tensor:
    """(R,) |state - feature|^2 / |feature|^2 of what a step hands on and the feature of the text that it stands for;
    0 for a feature of zeros."""
    wide = torch.promote_types(state.dtype, torch.float32)
    error, size = (part.to(wide).square().sum(-1) for part in (state - feature, feature))
    return torch.where(size > 0, error, 0) / size.clamp_min(torch.finfo(wide).tiny)


@dataclass(frozen=True)
class StepLayout:
    """What one layer computes in one TTT step.

    Attributes:
        rope: cos and sin of the positions.
        queries: (R,) indices of the rows that are computed further; None: all rows.
        documents: documents of these rows.
    """

    rope: tuple[Tensor, Tensor]
    queries: Tensor | None
    documents: Documents

    def select(self, states: Tensor) -> Tensor:
        """The positions that go on."""
        return states if self.queries is None else states.index_select(0, self.queries)


class Attention(nn.Module):
    """Grouped-query attention whose keys and values of earlier TTT steps are kept by the caller."""

    def __init__(self, head: EagleHead, size: int, reads: bool):
        super().__init__()
        width, kv_width = head.num_attention_heads * head.head_dim, head.num_key_value_heads * head.head_dim
        self.window = head.sliding_window
        self.embedded = slice(0, size if reads else 0)  # features of the input that come from embeddings
        self.states = slice(self.embedded.stop, None)
        inputs = size + self.embedded.stop
        self.q_proj, self.k_proj, self.v_proj = (Projection(inputs, out) for out in (width, kv_width, kv_width))
        self.o_proj = Projection(width, size)

    def project(self, embeddings: Tensor, rows: Tensor | None) -> Projections:
        """The left half of the input's products; queries for the rows only, or for all where rows is None."""
        queried = embeddings if rows is None else embeddings.index_select(0, rows)
        parts = (self.q_proj, queried), (self.k_proj, embeddings), (self.v_proj, embeddings)
        return tuple(projection(states, self.embedded) for projection, states in parts)

    def forward(
        self, states: Tensor, step: StepLayout, cache: KeyValueCache, projected: Projections | None
    ) -> tuple[Tensor, KeyValueCache]:
        """Keys and values of every position given, queries and output of `step.queries` among them. A single state is
        that of all positions."""
        query, key, value = projected or (None, None, None)
        rope = tuple(map(step.select, step.rope))
        key = rotate(by_head(self.k_proj(states, self.states, key), step.rope[0]), *step.rope)
        cache = (*cache, (key, by_head(self.v_proj(states, self.states, value), step.rope[0]).contiguous()))
        query = rotate(by_head(self.q_proj(step.select(states), self.states, query), rope[0]), *rope)
        keys, values = zip(*cache, strict=True)
        # A window ends at the query; so many of its keys are those of later steps.
        window = self.window and self.window - len(keys) + 1
        return self.o_proj(draft_attention(query, keys, values, step.documents, window).flatten(1)), cache


class DraftLayer(nn.Module):
    """A Llama block. The first one reads cat(embedding, feature); further ones read the state alone."""

    def __init__(self, head: EagleHead, size: int, eps: float, first: bool):
        super().__init__()
        self.norm_before_residual = first and head.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps) if first else None
        self.self_attn = Attention(head, size, reads=first)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, head.intermediate_size)

    def forward(
        self, state: Tensor, step: StepLayout, cache: KeyValueCache, projected: Projections | None
    ) -> tuple[Tensor, KeyValueCache]:
        """The state after the block, (R, H), and the cache with this step's keys and values."""
        normed = self.input_layernorm(state) if self.hidden_norm is None else self.hidden_norm(state)
        residual = normed if self.norm_before_residual else state
        attended, cache = self.self_attn(normed, step, cache, projected)
        state = step.select(residual) + attended
        return state + self.mlp(self.post_attention_layernorm(state)), cache


class DraftModel(DraftModule):
    """The trainable head; `unroll` runs the TTT steps."""

    head: EagleHead

    def __init__(self, shape: DraftShape):
        super().__init__(shape)
        head, size, eps = self.head, shape.hidden_size, shape.rms_norm_eps
        self.input_norm = RMSNorm(shape.num_aux_layers * size, eps) if head.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList([RMSNorm(size, eps) for _ in range(shape.num_aux_layers)]) if head.fc_norm else None
        )
        self.fc = Projection(shape.num_aux_layers * size, size)
        self.midlayer = DraftLayer(head, size, eps, first=True)
        further = range(1, head.num_layers)
        self.layers = nn.ModuleDict({str(i): DraftLayer(head, size, eps, first=False) for i in further})
        self.norm = RMSNorm(size, eps)
        self.lm_head = Projection(size, head.draft_vocab_size)
        self.rope = Rotary(shape)
        self.feature_weight = getattr(head, "feature_weight", 0.0)  # P-EAGLE's positions hand nothing on

    def combine(self, aux: Tensor) -> Tensor:
        """Fuse the aux hidden states (T, N * H), layer ids ascending, into the first feature (T, H)."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            pieces = aux.unflatten(-1, (len(self.fc_norm), -1)).unbind(-2)
            aux = torch.cat([norm(piece) for norm, piece in zip(self.fc_norm, pieces, strict=True)], dim=-1)
        return self.fc(aux)

    def states(self, batch: PackedBatch, embeddings: Tensor, num_positions: int) -> tuple[Tensor, Tensor | None]:
        """Rows of step 0, then of step 1, and so on."""
        embedded = nn.functional.embedding(batch.input_ids, embeddings)
        outputs, errors = self.unroll(batch.aux, embedded, batch.positions, batch.layout, num_positions)
        return torch.cat(outputs), self.feature_weight * torch.cat(errors) if errors else None

    def unroll(
        self, aux: Tensor, embeddings: Tensor, positions: Tensor, layout: Layout, num_steps: int
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Run K TTT steps.

        With `recompute` only each step's state, keys and values are kept, and the step is run again in the backward.

        Args:
            aux: (T, N * H) aux hidden states.
            embeddings: (T, H) embeddings of the tokens; step k at index t reads that of x[t + 1 + k].
            positions: (T,) positions that the target had; step k rotates by positions + k.
            layout: documents and rows of the batch.
            num_steps: K, number of TTT steps.

        Returns:
            K times (R, H), or (P_k, H) of the rows that step k is computed for, after the final norm, ready for
            lm_head. In training, where it is to be learned, K times (R,) or (P_k,) `feature_error` as well.
        """
        recompute = self.recompute and torch.is_grad_enabled()
        run_step = partial(checkpoint, self._run_step, use_reentrant=False) if recompute else self._run_step
        learned = self.feature_weight > 0 and torch.is_grad_enabled()
        outputs, errors = [], []
        # Checkpointing whole steps keeps less than recomputing cheap activations; one tensor cannot be under both.
        with nullcontext() if recompute else recomputing():
            caches: tuple[KeyValueCache, ...] = ((),) * (1 + len(self.layers))
            # A further layer wants the state after step 0 of every token, so queries of all of them.
            rows = layout.rows if not self.layers and len(layout.rows) < len(embeddings) else None
            first = self.midlayer.self_attn.project(self.midlayer.input_layernorm(embeddings), rows)
            later = tuple(t if len(t) == len(layout.rows) else t.index_select(0, layout.rows) for t in first)
            state = self.combine(aux)
            features = state.detach() if learned else state[:0]
            for k in range(num_steps):
                if k and layout.roots:
                    places = torch.searchsorted(layout.roots[k - 1], layout.roots[k])
                    state, caches = state.index_select(0, places), tuple(of_rows(cache, places) for cache in caches)
                rope = self.rope(positions if k == 0 else layout.at(k, positions[layout.rows]) + k, state.dtype)
                state, output, caches = run_step(k, state, later if k else first, rope, layout, caches)
                trim_heap(output)
                outputs.append(output)
                if learned:
                    # What wraps around at the end stands for no token, and is not scored.
                    of_text = features.index_select(0, (layout.at(k, layout.rows) + 1 + k) % len(features))
                    errors.append(feature_error(state, of_text))
            return outputs, errors

    def _run_step(
        self, k: int, state: Tensor, projected: Projections, rope: tuple[Tensor, Tensor], layout: Layout,
        caches: tuple[KeyValueCache, ...],
    ) -> tuple[Tensor, Tensor, tuple[KeyValueCache, ...]]:  # fmt: skip
        """The next step's feature, this step's output, and every layer's keys and values with this step's."""
        layers = [self.midlayer, *self.layers.values()]
        extended = []
        state, read = self._inputs(k, state, projected, layout)
        for layer, cache in zip(layers, caches, strict=True):
            step = self._layout(k, layer is layers[-1], rope, layout)
            state, cache = layer(state, step, cache, read if layer is self.midlayer else None)
            extended.append(cache)
        output = self.norm(state)
        return output if self.head.norm_output else state, output, tuple(extended)

    def _inputs(self, k: int, state: Tensor, projected: Projections, layout: Layout) -> tuple[Tensor, Projections]:
        """What step k reads at each row: the feature, here the last step's, and the next token's projections."""
        # Entry t + 1 + k at index t. What wraps around at the end is read past a document's end, and is not used.
        query, *states = (torch.roll(part, -1 - k, 0) for part in projected)
        query = query if k == 0 and self.layers else layout.at(k, query)
        return state, (query, *(states if k == 0 else (layout.at(k, part) for part in states)))

    @staticmethod
    def _layout(k: int, last_layer: bool, rope: tuple[Tensor, Tensor], layout: Layout) -> StepLayout:
        """Step 0 computes every token, except that only the rows leave its last layer; later steps, the rows."""
        if k:
            return StepLayout(rope, None, layout.documents(k))
        if last_layer and (layout.roots or len(layout.rows) < rope[0].shape[0]):
            return StepLayout(rope, layout.at(0, layout.rows), layout.documents(0))
        return StepLayout(rope, None, (layout.cu_seqlens, layout.cu_seqlens, (layout.longest, layout.longest), None))


class Eagle3(Drafter):
    """EAGLE-3, and 3.1 by its norms, behind the interface of `drafters.base`."""

    head: Eagle3Head
    MODULE = DraftModel
    vllm = Eagle3Files()

    @property
    def learns_features(self) -> bool:
        return self.head.feature_weight > 0

    def position_weights(self) -> Tensor:
        """decay**k."""
        return torch.tensor([self.head.step_weight_decay**k for k in range(self.num_positions)], dtype=torch.float64)
