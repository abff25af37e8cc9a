"""P-EAGLE (arXiv 2602.01469): EAGLE-3's model fills all draft positions in one pass.

Draft position 0 reads what EAGLE-3 reads. Every deeper one reads the mask token and a trained mask state in place of
the next token and the last step's feature, which do not exist yet, and sees the keys and values of the shallower
positions of its own root. So no position waits for another's output; what training costs, and the attention pattern,
are those of training-time test. Deeper positions carry loss on fewer rows, which saves lm_head's share of the work;
their states are computed everywhere. The paper also trains the embeddings, whole: in gpt-oss-120b a gigabyte to serve
beside the target's. Here the mask token's is the target's, and what a position reads is learned by the mask state.

Shapes: R rows, H hidden, N aux layers, K draft positions.
"""

import torch
from torch import Tensor, nn

from drafthead.drafters.base import Drafter, DraftShape, evenly
from drafthead.drafters.batch import PackedBatch
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
        """K x R rows, as EAGLE-3's."""
        assert isinstance(self.shape.head, PEagleHead)
        self.mask_embedding = embeddings[self.shape.head.mask_token_id]
        return super().head_rows(batch, embeddings, num_positions, recompute)

    def _inputs(self, k: int, state: Tensor, projected: EmbeddingProjections) -> tuple[Tensor, EmbeddingProjections]:
        if k == 0:
            return super()._inputs(k, state, projected)
        first = self.midlayer
        masked = first.self_attn.project(first.input_layernorm(self.mask_embedding[None]), None)
        rows = EmbeddingProjections(*(p.expand(len(state), -1) for p in (masked.query, masked.key, masked.value)))
        return self.combine(self.mask_hidden).expand(len(state), -1), rows


_LEAST_SHARE = 0.2  # of the rows, at any depth


class PEagle(Drafter):
    """P-EAGLE behind the interface of `drafters.base`."""

    head: PEagleHead
    MODULE = PEagleModel
    vllm = PEagleFiles()

    @property
    def draws(self) -> bool:  # type: ignore[override]
        """Unless all rows are used."""
        return self.head.depth_ratio < 1

    def trained_rows(self, loss_mask: Tensor, draw: int = 0) -> Tensor:
        """(K, T) bool: max(r^k, 0.2) of the rows at draft position k, all of them also rows of position k - 1."""
        share = torch.full((self.num_positions, 1), self.head.depth_ratio).cumprod(0) / self.head.depth_ratio
        return self.loss_rows(loss_mask) & (evenly(len(loss_mask), draw) < share.clamp_min(_LEAST_SHARE))
