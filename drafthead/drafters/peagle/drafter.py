"""P-EAGLE (arXiv 2602.01469): EAGLE-3's model fills all draft positions in one pass.

Draft position 0 reads what EAGLE-3 reads. Every deeper one reads the mask token and a trained mask state in place of
the next token and the last step's feature, which do not exist yet, and sees the keys and values of the shallower
positions of its own root. So no position waits for another's output; the attention pattern is that of training-time
test. Deeper positions are trained, and computed, on fewer rows. The paper also trains the embeddings, whole: in
gpt-oss-120b a gigabyte to serve beside the target's. Here the mask token's is the target's, and what a position reads
is learned by the mask state.

Shapes: R rows, H hidden, N aux layers, K draft positions.
"""

import math

import torch
from torch import Tensor, nn

from drafthead.drafters.base import Drafter, DraftShape, evenly
from drafthead.drafters.batch import Layout, PackedBatch
from drafthead.drafters.eagle3.drafter import DraftModel, EmbeddingProjections
from drafthead.drafters.peagle.config import PEagleHead
from drafthead.drafters.peagle.vllm import PEagleFiles
from drafthead.losses.fused import HeadRows


class PEagleModel(DraftModel):
    """The trainable head."""

    def __init__(self, shape: DraftShape):
        super().__init__(shape)
        self.mask_hidden = nn.Parameter(torch.randn(1, shape.num_aux_layers * shape.hidden_size))
        self.mask_embedding = torch.zeros(shape.hidden_size)  # the target's, with every batch

    def head_rows(
        self, batch: PackedBatch, embeddings: Tensor, num_positions: int, recompute: bool = False
    ) -> HeadRows:
        """Rows as EAGLE-3's."""
        assert isinstance(self.shape.head, PEagleHead)
        self.mask_embedding = embeddings[self.shape.head.mask_token_id]
        return super().head_rows(batch, embeddings, num_positions, recompute)

    def _inputs(
        self, k: int, state: Tensor, projected: EmbeddingProjections, layout: Layout
    ) -> tuple[Tensor, EmbeddingProjections]:
        if k == 0:
            return super()._inputs(k, state, projected, layout)
        embedded = self.midlayer.input_layernorm(self.mask_embedding[None])  # the same for all rows: products of one
        return self.combine(self.mask_hidden), self.midlayer.self_attn.project(embedded, None)


_LEAST_SHARE = 0.2  # of the rows, at any depth


class PEagle(Drafter):
    """P-EAGLE behind the interface of `drafters.base`."""

    head: PEagleHead
    MODULE = PEagleModel
    vllm = PEagleFiles()
    stops_at_rejection = True

    @property
    def draws(self) -> bool:  # type: ignore[override]
        """Unless all rows are used."""
        return self.head.depth_ratio < 1

    @property
    def num_slots(self) -> int:
        """Fewer the deeper."""
        return math.ceil(self._shares.sum())

    @property
    def _shares(self) -> Tensor:
        """(K, 1) max(r^k, 0.2) of the rows at draft position k."""
        share = torch.full((self.num_positions, 1), self.head.depth_ratio).cumprod(0) / self.head.depth_ratio
        return share.clamp_min(_LEAST_SHARE)

    def trained_rows(self, loss_mask: Tensor, draw: int = 0) -> Tensor:
        """(K, T) bool: a share of the rows, at each position among those of the one before."""
        return self.loss_rows(loss_mask) & (evenly(len(loss_mask), draw) < self._shares)
