"""The EAGLE-3 draft head: one small transformer that reads the target's hidden states.

Module and parameter names are those of the exported file (`fc`, `midlayer`, `norm`, `lm_head`, ...), so
export is a copy. The embedding is the target's and frozen: it is passed in, not owned. Only dense Llama
blocks exist, which is what serving engines accept; for a sparse or sliding-window draft the engine's
model class would have to change first.

Shapes: T tokens of a packed batch, R rows that lead to a loss (see core.layout), H hidden, N taps, K TTT
steps, D draft vocabulary, V target vocabulary.
"""

from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

from drafthead.config import HeadConfig, Recipe
from drafthead.core.attention import ttt_attention
from drafthead.core.host_memory import give_back
from drafthead.core.layout import Layout
from drafthead.core.remake import beside, gated, remaking, rms_norm
from drafthead.core.rope import rope_frequencies, rotate, rotation
from drafthead.models.target import TargetSpec


@dataclass(frozen=True)
class DraftShape:
    """Everything that determines the head's parameters and arithmetic.

    Attributes:
        head: the recipe's section.
        hidden_size: H, the target's.
        vocab_size: V, the target's.
        num_taps: N.
        rms_norm_eps: the target's.
        rope_parameters: the target's, as in its config.json.
        max_position_embeddings: the target's.
    """

    head: HeadConfig
    hidden_size: int
    vocab_size: int
    num_taps: int
    rms_norm_eps: float
    rope_parameters: dict
    max_position_embeddings: int

    def rope_config(self) -> LlamaConfig:
        """The part of a Llama configuration that fixes the rotary embedding."""
        return LlamaConfig(
            hidden_size=self.hidden_size,
            num_attention_heads=self.head.num_attention_heads,
            head_dim=self.head.head_dim,
            rope_parameters=dict(self.rope_parameters),
            max_position_embeddings=self.max_position_embeddings,
        )


def draft_shape(recipe: Recipe, spec: TargetSpec) -> DraftShape:
    """The head's shape, from the recipe and its target."""
    return DraftShape(
        head=recipe.head,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        num_taps=len(recipe.target.tap_ids),
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters=spec.rope_parameters,
        max_position_embeddings=spec.max_position_embeddings,
    )


class RMSNorm(nn.Module):
    """Root-mean-square norm with float32 statistics (float64 for float64 inputs)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        return rms_norm(states, self.weight, self.eps)


@dataclass(frozen=True)
class Past:
    """Keys and values of the TTT steps so far in one layer, rotated: step 0 (T, G, D), later steps (R, G, D)."""

    keys: tuple[Tensor, ...] = ()
    values: tuple[Tensor, ...] = ()

    def extended(self, key: Tensor, value: Tensor) -> "Past":
        """With one more step. A new object, so that a checkpointed step can be run again."""
        return Past((*self.keys, key), (*self.values, value))


class Attention(nn.Module):
    """Grouped-query attention whose keys and values of earlier TTT steps are kept by the caller."""

    def __init__(self, shape: DraftShape, input_size: int):
        super().__init__()
        head = shape.head
        self.head_dim = head.head_dim
        self.q_proj = nn.Linear(input_size, head.num_attention_heads * head.head_dim, bias=False)
        self.k_proj = nn.Linear(input_size, head.num_key_value_heads * head.head_dim, bias=False)
        self.v_proj = nn.Linear(input_size, head.num_key_value_heads * head.head_dim, bias=False)
        self.o_proj = nn.Linear(head.num_attention_heads * head.head_dim, shape.hidden_size, bias=False)

    def forward(self, states: Tensor, step: "Step", past: Past) -> tuple[Tensor, Past]:
        """Keys and values of every position given, queries and output of `step.queries` among them."""
        heads = (-1, self.head_dim)
        key = rotate(self.k_proj(states).unflatten(-1, heads), *step.rope)
        past = past.extended(key, self.v_proj(states).unflatten(-1, heads))
        query = rotate(self.q_proj(step.select(states)).unflatten(-1, heads), *map(step.select, step.rope))
        mixed = ttt_attention(query, past.keys, past.values, step.cu_queries, step.cu_keys)
        return self.o_proj(mixed.flatten(1)), past


@dataclass(frozen=True)
class Step:
    """What one layer computes in one TTT step.

    Attributes:
        rope: cos and sin of the positions given.
        queries: (R,) which of them go on, or None for all.
        cu_queries: (S + 1,) document boundaries among those.
        cu_keys: (S + 1,) document boundaries among the step-0 keys.
    """

    rope: tuple[Tensor, Tensor]
    queries: Tensor | None
    cu_queries: Tensor
    cu_keys: Tensor

    def select(self, states: Tensor) -> Tensor:
        """The positions that go on."""
        return states if self.queries is None else states[self.queries]


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, intermediate_size, bias=False)
        self.down_proj = nn.Linear(intermediate_size, hidden_size, bias=False)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(states), self.up_proj(states)))


class DraftLayer(nn.Module):
    """A Llama block. The first one reads cat(embedding, feature); further ones read the state alone."""

    def __init__(self, shape: DraftShape, first: bool):
        super().__init__()
        size, eps = shape.hidden_size, shape.rms_norm_eps
        self.norm_before_residual = shape.head.norm_before_residual
        self.input_layernorm = RMSNorm(size, eps)
        self.hidden_norm = RMSNorm(size, eps) if first else None
        self.self_attn = Attention(shape, 2 * size if first else size)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, shape.head.intermediate_size)

    def forward(self, state: Tensor, embedding: Tensor, step: Step, past: Past) -> tuple[Tensor, Past]:
        residual = state
        if self.hidden_norm is None:
            mixed = self.input_layernorm(state)
        else:
            normed = self.hidden_norm(state)
            residual = normed if self.norm_before_residual else state
            mixed = beside(self.input_layernorm(embedding), normed)  # (T, 2H)
        attended, past = self.self_attn(mixed, step, past)
        state = step.select(residual) + attended
        return state + self.mlp(self.post_attention_layernorm(state)), past


class DraftModel(nn.Module):
    """The trainable head.

    `unroll` runs the TTT steps; `drafthead.training` adds the loss, `drafthead.exporting` writes the file.
    """

    def __init__(self, shape: DraftShape):
        super().__init__()
        head, size, eps = shape.head, shape.hidden_size, shape.rms_norm_eps
        self.shape = shape
        self.input_norm = RMSNorm(shape.num_taps * size, eps) if head.norm_before_fc else None
        self.fc_norm = nn.ModuleList([RMSNorm(size, eps) for _ in range(shape.num_taps)]) if head.fc_norm else None
        self.fc = nn.Linear(shape.num_taps * size, size, bias=False)
        self.midlayer = DraftLayer(shape, first=True)
        self.layers = nn.ModuleDict({str(i): DraftLayer(shape, first=False) for i in range(1, head.num_layers)})
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, head.draft_vocab_size, bias=False)
        frequencies, self._rope_factor = rope_frequencies(shape.rope_config())
        # float32 whatever the compute type: positions in the thousands need it.
        self._frequencies = frequencies.to(torch.float32)

    def combine(self, aux: Tensor) -> Tensor:
        """Fuse the taps (T, N * H), in ascending tap order, into the first feature (T, H)."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            pieces = aux.unflatten(-1, (len(self.fc_norm), -1)).unbind(-2)
            aux = torch.cat([norm(piece) for norm, piece in zip(self.fc_norm, pieces, strict=True)], dim=-1)
        return self.fc(aux)

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin at positions, in float32 or wider."""
        frequencies = self._frequencies.to(positions.device, torch.promote_types(dtype, torch.float32))
        return rotation(positions, frequencies, self._rope_factor)

    def unroll(
        self,
        aux: Tensor,
        embeddings: Iterable[Tensor],
        positions: Tensor,
        layout: Layout,
        recompute: bool = False,
    ) -> Tensor:
        """Run K TTT steps, one for each of the embeddings.

        Args:
            aux: (T, N * H) tapped states.
            embeddings: entry k holds the embedding of x[t + 1 + k] at index t: (T, H) for step 0, which gives
                every token a key, and (R, H) from step 1 on.
            positions: (T,) the target's own positions; step k rotates by positions + k.
            layout: documents and rows.
            recompute: keep only each step's state, keys and values, and run the step again in the backward.

        Returns:
            (K, R, H), after the final norm, ready for lm_head.
        """
        # Recomputing keeps less than remaking, and a tensor cannot be had both ways.
        with nullcontext() if recompute else remaking():
            return torch.stack(list(self._steps(aux, embeddings, positions, layout, recompute)))

    def _steps(
        self, aux: Tensor, embeddings: Iterable[Tensor], positions: Tensor, layout: Layout, recompute: bool
    ) -> Iterator[Tensor]:
        """(R, H) per TTT step; arguments as in `unroll`."""
        run_step = partial(checkpoint, self._run_step, use_reentrant=False) if recompute else self._run_step
        pasts = tuple(Past() for _ in range(1 + len(self.layers)))
        state = self.combine(aux)
        for k, embedding in enumerate(embeddings):
            rope = self.rope(positions if k == 0 else positions[layout.rows] + k, state.dtype)
            state, output, pasts = run_step(k, state, embedding, rope, layout, pasts)
            give_back(output)
            if output.requires_grad:
                output.register_hook(give_back)  # the backward leaves holes as well
            yield output

    def _run_step(
        self, k: int, state: Tensor, embedding: Tensor, rope: tuple[Tensor, Tensor], layout: Layout,
        pasts: tuple[Past, ...],
    ) -> tuple[Tensor, Tensor, tuple[Past, ...]]:  # fmt: skip
        """The next step's feature, this step's output, and every layer's keys and values with this step's."""
        layers = [self.midlayer, *self.layers.values()]
        extended = []
        for layer, past in zip(layers, pasts, strict=True):
            state, past = layer(state, embedding, self._plan(k, layer is layers[-1], rope, layout), past)
            extended.append(past)
        output = self.norm(state)
        return output if self.shape.head.norm_output else state, output, tuple(extended)

    @staticmethod
    def _plan(k: int, last_layer: bool, rope: tuple[Tensor, Tensor], layout: Layout) -> Step:
        """Step 0 computes every token, except that only the rows leave its last layer; later steps, the rows."""
        if k == 0 and last_layer and len(layout.rows) < rope[0].shape[0]:
            return Step(rope, layout.rows, layout.cu_rows, layout.cu_seqlens)
        if k == 0:
            return Step(rope, None, layout.cu_seqlens, layout.cu_seqlens)
        return Step(rope, None, layout.cu_rows, layout.cu_seqlens)


def frozen_copy(shape: DraftShape, weights: dict[str, Tensor], device: torch.device, dtype: torch.dtype) -> DraftModel:
    """A head with the given weights that is not trained.

    Args:
        shape: of the head.
        weights: every parameter by name; d2t and t2d may be among them.
        device: where it computes.
        dtype: in which type.
    """
    with torch.device("meta"):  # no memory and no random numbers for weights that are replaced
        model = DraftModel(shape)
    parameters = {name: weights[name].to(device, dtype) for name in model.state_dict()}
    model.load_state_dict(parameters, assign=True)
    return model.eval().requires_grad_(False)
