"""DFlash (arXiv 2602.06036): a block of masked positions is filled in one pass, over the target's own states.

From root t, whose state is known, the block holds the known token x[t+1] and K masks. Its queries see keys and values
that every layer forms directly from the fused aux hidden states of the tokens 0..t, and the block up to their own slot;
the draft never runs over its context. The mask at slot j predicts x[t+1+j]. One document, root 2, K = 2:

    position   0   1   2 | 3     4     5
    keys       c0  c1  c2  x[3]  MASK  MASK        c: from the target's states
    predicts                     x[4]  x[5]

The paper's block sees itself in both directions (`causal: false`). Nothing is lost by seeing less, as later masks know
nothing more, and at any smaller K the drafts are the same; in both directions they lack slots that training had.

Training forms the block of every root at once, or of a share of those that carry loss, drawn anew in each epoch
(`anchor_share`; the paper's anchors): a block costs K + 1 rows of every product, and no block reads another.

Names and arithmetic are those of vLLM's `DFlashDraftModel`. Shapes: T tokens, R rows, P of them roots
whose block is formed, K masked positions, H hidden, N aux layers, Q query and G key/value heads, d head dimension.
"""

import math
from contextlib import nullcontext
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from drafthead.drafters.attention import draft_attention
from drafthead.drafters.base import Drafter, DraftModule, DraftShape
from drafthead.drafters.batch import Layout, PackedBatch
from drafthead.drafters.dflash.config import BlockHead
from drafthead.drafters.layers import MLP, Projection, RMSNorm, Rotary, by_head, rotate
from drafthead.drafters.recompute import recomputing
from drafthead.drafters.vllm import WINDOWED, Config, HeadFiles, decoder_config, refuse_other, served_decoder

_OWN, _SINKS = "dflash_config", "attention_sink_bias"  # keys of config.json
Rotation = tuple[Tensor, Tensor]


class BlockAttention(nn.Module):
    """Grouped-query attention of a block over its context and itself; queries and keys have norms."""

    def __init__(self, head: BlockHead, size: int, eps: float):
        super().__init__()
        self.head_dim, self.window, self.causal = head.head_dim, head.sliding_window, head.causal
        width, kv_width = head.num_attention_heads * head.head_dim, head.num_key_value_heads * head.head_dim
        self.q_proj, self.k_proj, self.v_proj = (Projection(size, out) for out in (width, kv_width, kv_width))
        self.o_proj = Projection(width, size)
        self.q_norm, self.k_norm = RMSNorm(head.head_dim, eps), RMSNorm(head.head_dim, eps)
        self.attention_sink_bias = nn.Parameter(torch.zeros(head.num_attention_heads)) if head.attention_sinks else None

    def key_value(self, states: Tensor, rope: Rotation) -> tuple[Tensor, Tensor]:
        """Keys, rotated, and values, each (rows, G, d), of states (rows, H)."""
        value = by_head(self.v_proj(states), rope[0]).contiguous()
        return self._rotated(self.k_norm, self.k_proj(states), rope), value

    def _rotated(self, norm: RMSNorm, projected: Tensor, rope: Rotation) -> Tensor:
        """Queries or keys (rows, heads, d) of (rows, heads * d), or of one row for all."""
        normed = norm(projected.unflatten(-1, (-1, self.head_dim)))
        return rotate(by_head(normed.flatten(1), rope[0]), *rope)

    def forward(
        self, block: list[Tensor], context: Tensor, ropes: list[Rotation], layout: Layout, first: int
    ) -> list[Tensor]:
        """(P, H) for each slot from `first` on.

        Args:
            block: states of K + 1 slots, each (P, H), or (1, H) where a slot is the same for every root.
            context: (T, H) states of the text that the slots attend to.
            ropes: rotations of the context, then of each slot.
            layout: documents and rows of the batch.
            first: first slot that is computed; those before it are only attended to.
        """
        keys, values = zip(*map(self.key_value, [context, *block], ropes), strict=True)
        mixed = []
        for j in range(first, len(block)):
            query = self._rotated(self.q_norm, self.q_proj(block[j]), ropes[1 + j])
            window = self.window and self.window - 1 - j  # the rest of it lies in the block
            slots = 2 + j if self.causal else len(keys)
            text = layout.documents(0)
            seen = draft_attention(query, keys[:slots], values[:slots], text, window, self.attention_sink_bias)
            mixed.append(self.o_proj(seen.flatten(1)))
        return mixed


class BlockLayer(nn.Module):
    """A Qwen3 block."""

    def __init__(self, head: BlockHead, size: int, eps: float):
        super().__init__()
        self.input_layernorm = RMSNorm(size, eps)
        self.self_attn = BlockAttention(head, size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.mlp = MLP(size, head.intermediate_size)

    def forward(
        self, block: list[Tensor], context: Tensor, ropes: list[Rotation], layout: Layout, first: int
    ) -> list[Tensor]:
        """The slots from `first` on, (P, H) each; arguments as of `BlockAttention.forward`."""
        attended = self.self_attn([self.input_layernorm(slot) for slot in block], context, ropes, layout, first)
        states = [slot + more for slot, more in zip(block[first:], attended, strict=True)]
        return [state + self.mlp(self.post_attention_layernorm(state)) for state in states]


class DFlashModel(DraftModule):
    """The trainable head."""

    head: BlockHead
    num_unscored_slots: ClassVar[int] = 1  # slots of a block that predict nothing: the known token's

    def __init__(self, shape: DraftShape):
        super().__init__(shape)
        head, size, eps = self.head, shape.hidden_size, shape.rms_norm_eps
        self.fc = Projection(shape.num_aux_layers * size, size)
        self.hidden_norm = RMSNorm(size, eps)
        self.layers = nn.ModuleList(BlockLayer(head, size, eps) for _ in range(head.num_layers))
        self.norm = RMSNorm(size, eps)
        self.lm_head = Projection(size, head.draft_vocab_size)
        self.rope = Rotary(shape)

    def states(self, batch: PackedBatch, embeddings: Tensor, num_positions: int) -> tuple[Tensor, None]:
        """(K x P, H), slot after slot: slot 1 + k holds draft position k."""
        return self.slots(batch, embeddings, num_positions).flatten(0, 1), None

    def slots(self, batch: PackedBatch, embeddings: Tensor, num_positions: int) -> Tensor:
        """(K, P, H): as `fill`, of blocks of the known token and masks."""
        known = nn.functional.embedding(batch.ahead(1), embeddings)
        masks = [embeddings[self.head.mask_token_id][None]] * (num_positions - 1 + self.num_unscored_slots)
        return self.fill([known, *masks], batch.aux, batch.positions, batch.layout)

    def fill(self, block: list[Tensor], aux: Tensor, positions: Tensor, layout: Layout) -> Tensor:
        """(K, P, H), after the final norm, of the slots of every root's block that predict.

        With `recompute` only the layers' inputs are kept, and each layer is run again in the backward.

        Args:
            block: embeddings of the slots, (P, H) or (1, H) each; the first is that of the known token.
            aux: (T, N * H) aux hidden states.
            positions: (T,) positions that the target had.
            layout: documents and rows of the batch.
        """
        roots = layout.at(0, positions[layout.rows])
        starts = [positions, *(roots + 1 + j for j in range(len(block)))]
        ropes = [self.rope(at, aux.dtype) for at in starts]
        recompute = self.recompute and torch.is_grad_enabled()
        with nullcontext() if recompute else recomputing():
            context = self.hidden_norm(self.fc(aux))
            for layer in self.layers:
                run = partial(checkpoint, layer, use_reentrant=False) if recompute else layer
                block = run(block, context, ropes, layout, self.num_unscored_slots if layer is self.layers[-1] else 0)
            return self.norm(torch.stack(block))


class DFlashFiles(HeadFiles):
    """Files of DFlash heads as vLLM 0.32 reads them, in both directions. Plain layout only.

    `target_layer_ids` count blocks from 0: one less than the boundaries of this project, and of vLLM inside.
    """

    METHOD = TYPE = "dflash"
    OWN: ClassVar[dict[str, str]] = {
        "mask_token_id": f"{_OWN}.mask_token_id", "causal": f"{_OWN}.causal", "attention_sinks": f"{_OWN}.{_SINKS}",
    }  # fmt: skip
    ALGORITHM = "DFlash"
    ARCHITECTURES: tuple[str, ...] = ("DFlashDraftModel",)

    def plain_config(self, shape: DraftShape, aux_layer_ids: tuple[int, ...], dtype: str) -> Config:
        assert isinstance(shape.head, BlockHead)
        dflash = {"mask_token_id": shape.head.mask_token_id, "target_layer_ids": [i - 1 for i in aux_layer_ids]}
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **decoder_config(shape, dtype),
            _OWN: {**dflash, "causal": shape.head.causal, _SINKS: shape.head.attention_sinks},
        }

    def served_values(self, config: Config) -> Config:
        dflash = config[_OWN]
        refuse_other(config, is_neox_style=True)
        refuse_other(dflash, attention_value_scale=None)
        stated = (config.get("is_causal"), dflash.get("causal"), WINDOWED in (config.get("layer_types") or ()))
        if dflash.get("use_swa"):
            config = config | {"layer_types": [WINDOWED]}
        if "swa_window_size" in dflash:
            config = config | {"sliding_window": dflash["swa_window_size"]}
        return {
            **served_decoder(config),
            f"{_OWN}.mask_token_id": dflash["mask_token_id"],
            f"{_OWN}.target_layer_ids": dflash["target_layer_ids"],
            f"{_OWN}.causal": next(bool(causal) for causal in stated if causal is not None),
            f"{_OWN}.{_SINKS}": bool(dflash.get(_SINKS, config.get("add_swa_attention_sink_bias", False))),
        }

    def boundaries(self, served: Config, num_layers: int, layer_ids_are: str | None) -> list[int]:
        """`layer_ids_are` "boundaries": the file counts them so, and is corrected."""
        ids = served[f"{_OWN}.target_layer_ids"]
        return ids if layer_ids_are == "boundaries" else [i + 1 for i in ids]


class DFlash(Drafter):
    """DFlash behind the interface of `drafters.base`."""

    head: BlockHead
    MODULE = DFlashModel
    vllm = DFlashFiles()
    whole_blocks = stops_at_rejection = True

    @property
    def shares(self) -> Tensor:
        """The whole block of a share of the roots."""
        return torch.full((self.num_positions, 1), self.head.anchor_share, dtype=torch.float64)

    @property
    def num_slots(self) -> int:
        """Those that predict, and those that do not, of a share of the roots."""
        return math.ceil((self.num_positions + self.MODULE.num_unscored_slots) * self.head.anchor_share)

    def position_weights(self) -> Tensor:
        """exp(-k / gamma)."""
        k = torch.arange(self.num_positions, dtype=torch.float64)
        return torch.ones_like(k) if self.head.position_decay is None else torch.exp(-k / self.head.position_decay)
