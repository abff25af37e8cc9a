"""The EAGLE-3 draft head: one small transformer that reads the target's hidden states.

Module and parameter names are those of the exported file (`fc`, `midlayer`, `norm`, `lm_head`, ...), so
export is a copy. The embedding is the target's and frozen: it is passed in, not owned. Only dense Llama
blocks exist, which is what serving engines accept; for a sparse or sliding-window draft the engine's
model class would have to change first.

Shapes: T tokens of a packed batch, R rows that lead to a loss (see drafters.layout), H hidden, N aux layers, K TTT
steps, D draft vocabulary, V target vocabulary.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import LlamaConfig

from drafthead.config import HeadConfig, Recipe
from drafthead.drafters.eagle3.block import DraftLayer, Past, Projection, Reading, RMSNorm, Step
from drafthead.drafters.host_memory import give_back
from drafthead.drafters.layout import Layout
from drafthead.drafters.recompute import remaking
from drafthead.drafters.rope import rope_frequencies, rotation
from drafthead.target.pieces import TargetSpec, check_aux_layer_ids, load_target_spec


@dataclass(frozen=True)
class DraftShape:
    """Everything that determines the head's parameters and arithmetic.

    Attributes:
        head: the recipe's section.
        hidden_size: H, the target's.
        vocab_size: V, the target's.
        num_aux_layers: N.
        rms_norm_eps: the target's.
        rope_parameters: the target's, as in its config.json.
        max_position_embeddings: the target's.
    """

    head: HeadConfig
    hidden_size: int
    vocab_size: int
    num_aux_layers: int
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
        num_aux_layers=len(recipe.target.aux_layer_ids),
        rms_norm_eps=spec.rms_norm_eps,
        rope_parameters=spec.rope_parameters,
        max_position_embeddings=spec.max_position_embeddings,
    )


def planned_shape(recipe: Recipe) -> DraftShape:
    """The head's shape before anything was trained; where the answers will choose its vocabulary, with the whole one.

    Raises:
        FileNotFoundError: the target's config.json is missing.
        ValueError: an aux layer lies beyond the target.
    """
    spec = load_target_spec(recipe.target_path, recipe.target.revision)
    check_aux_layer_ids(spec, recipe.target.aux_layer_ids)
    return replace(draft_shape(recipe, spec), head=recipe.head.sized(spec.vocab_size))


class DraftModel(nn.Module):
    """The trainable head.

    `unroll` runs the TTT steps; `drafthead.training` adds the loss, `drafthead.exporting` writes the file.
    """

    def __init__(self, shape: DraftShape):
        super().__init__()
        head, size, eps = shape.head, shape.hidden_size, shape.rms_norm_eps
        self.shape = shape
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
        frequencies, self._rope_factor = rope_frequencies(shape.rope_config())
        # float32 whatever the compute type: positions in the thousands need it.
        self._frequencies = frequencies.to(torch.float32)

    def combine(self, aux: Tensor) -> Tensor:
        """Fuse the aux layers (T, N * H), in ascending aux layer order, into the first feature (T, H)."""
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
        embeddings: Tensor,
        positions: Tensor,
        layout: Layout,
        num_steps: int,
        recompute: bool = False,
    ) -> Tensor:
        """Run K TTT steps.

        Args:
            aux: (T, N * H) aux hidden states.
            embeddings: (T, H) of the tokens; step k at index t reads that of x[t + 1 + k].
            positions: (T,) the target's own positions; step k rotates by positions + k.
            layout: documents and rows.
            num_steps: K.
            recompute: keep only each step's state, keys and values, and run the step again in the backward.

        Returns:
            (K, R, H), after the final norm, ready for lm_head.
        """
        # Recomputing keeps less than remaking, and a tensor cannot be had both ways.
        with nullcontext() if recompute else remaking():
            return torch.stack(list(self._steps(aux, embeddings, positions, layout, num_steps, recompute)))

    def _steps(
        self, aux: Tensor, embeddings: Tensor, positions: Tensor, layout: Layout, num_steps: int, recompute: bool
    ) -> Iterator[Tensor]:
        """(R, H) per TTT step; arguments as in `unroll`."""
        run_step = partial(checkpoint, self._run_step, use_reentrant=False) if recompute else self._run_step
        pasts = tuple(Past() for _ in range(1 + len(self.layers)))
        first, later = self.midlayer.read(embeddings, layout, only_layer=not self.layers)
        state = self.combine(aux)
        for k in range(num_steps):
            rope = self.rope(positions if k == 0 else positions[layout.rows] + k, state.dtype)
            state, output, pasts = run_step(k, state, later if k else first, rope, layout, pasts)
            give_back(output)
            yield output

    def _run_step(
        self, k: int, state: Tensor, reading: Reading, rope: tuple[Tensor, Tensor], layout: Layout,
        pasts: tuple[Past, ...],
    ) -> tuple[Tensor, Tensor, tuple[Past, ...]]:  # fmt: skip
        """The next step's feature, this step's output, and every layer's keys and values with this step's."""
        layers = [self.midlayer, *self.layers.values()]
        extended = []
        for layer, past in zip(layers, pasts, strict=True):
            plan = self._plan(k, layer is layers[-1], rope, layout)
            state, past = layer(state, plan, past, reading.ahead(1 + k) if layer is self.midlayer else None)
            extended.append(past)
        output = self.norm(state)
        return output if self.shape.head.norm_output else state, output, tuple(extended)

    @staticmethod
    def _plan(k: int, last_layer: bool, rope: tuple[Tensor, Tensor], layout: Layout) -> Step:
        """Step 0 computes every token, except that only the rows leave its last layer; later steps, the rows."""
        of_rows = (layout.most_rows, layout.longest)
        if k == 0 and last_layer and len(layout.rows) < rope[0].shape[0]:
            return Step(rope, layout.rows, layout.cu_rows, layout.cu_seqlens, of_rows)
        if k == 0:
            return Step(rope, None, layout.cu_seqlens, layout.cu_seqlens, (layout.longest, layout.longest))
        return Step(rope, None, layout.cu_rows, layout.cu_seqlens, of_rows)


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


def num_parameters(shape: DraftShape) -> int:
    """Trainable weights of a head; nothing is allocated."""
    with torch.device("meta"):
        return sum(p.numel() for p in DraftModel(shape).parameters())
