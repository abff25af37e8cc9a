"""P-EAGLE (arXiv 2602.01469): EAGLE-3's model fills all draft positions in one pass.

Draft position 0 reads what EAGLE-3 reads. Every deeper one reads the mask token and a trained mask state in place of
the next token and the last step's feature, which do not exist yet, and sees the keys and values of the shallower
positions of its own root. So no position waits for another's output; the attention pattern is that of training-time
test. Deeper positions are trained, and computed, on fewer rows. The paper also trains the embeddings, whole: in
gpt-oss-120b a gigabyte to serve beside the target's. Here the mask token's is the target's, and what a position reads
is learned by the mask state.

Shapes: R rows, H hidden, N aux layers, K draft positions.
"""

from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from drafthead.drafters.base import Drafter, DraftShape
from drafthead.drafters.batch import Layout, PackedBatch
from drafthead.drafters.eagle3.drafter import DraftModel, Projections
from drafthead.drafters.eagle3.vllm import LAYER_IDS, Eagle3Files
from drafthead.drafters.peagle.config import PEagleHead
from drafthead.drafters.vllm import Config

_MASK = "ptd_token_id"  # key of config.json that holds the mask token
_LEAST_SHARE = 0.2  # of the rows, at any depth


class PEagleModel(DraftModel):
    """The trainable head."""

    head: PEagleHead

    def __init__(self, shape: DraftShape):
        super().__init__(shape)
        self.mask_hidden = nn.Parameter(torch.randn(1, shape.num_aux_layers * shape.hidden_size))
        self.mask_embedding = torch.zeros(shape.hidden_size)  # the target's, with every batch

    def states(self, batch: PackedBatch, embeddings: Tensor, num_positions: int) -> tuple[Tensor, Tensor | None]:
        """As EAGLE-3's."""
        self.mask_embedding = embeddings[self.head.mask_token_id]
        return super().states(batch, embeddings, num_positions)

    def _inputs(self, k: int, state: Tensor, projected: Projections, layout: Layout) -> tuple[Tensor, Projections]:
        if k == 0:
            return super()._inputs(k, state, projected, layout)
        embedded = self.midlayer.input_layernorm(self.mask_embedding[None])  # the same for all rows: products of one
        return self.combine(self.mask_hidden), self.midlayer.self_attn.project(embedded, None)


class PEagleFiles(Eagle3Files):
    """Files of P-EAGLE heads as vLLM 0.32 reads them: EAGLE-3's, with the mask token and the mask state.

    In the speculators layout vLLM does not copy `fc_norm` from beside the layer's keys, so it stands among them.
    """

    TYPE = "peagle"
    OWN: ClassVar[dict[str, str]] = {**Eagle3Files.OWN, "mask_token_id": _MASK}
    SWAPPABLE = False
    ALGORITHM = "P-EAGLE"
    ARCHITECTURES = ("LlamaForCausalLMEagle3", "PEagleDraftModel", "PeagleLlamaForCausalLM")
    SPECULATORS = ("peagle", "PEagleDraftModel")
    BESIDE_LAYER: ClassVar[Config] = {
        "draft_vocab_size": None, "target_hidden_size": None, "norm_before_residual": False, "norm_before_fc": False,
        LAYER_IDS: None,
    }  # fmt: skip

    def speculative_config(self, directory: Path | str, num_speculative_tokens: int) -> dict[str, Any]:
        return {**super().speculative_config(directory, num_speculative_tokens), "parallel_drafting": True}

    def plain_config(self, shape: DraftShape, aux_layer_ids: tuple[int, ...], dtype: str) -> Config:
        assert isinstance(shape.head, PEagleHead)
        return {**super().plain_config(shape, aux_layer_ids, dtype), _MASK: shape.head.mask_token_id}

    def speculators_config(self, config: Config, num_speculative_tokens: int, verifier: Config) -> Config:
        written = super().speculators_config(config, num_speculative_tokens, verifier)
        return {**written, "mask_token_id": config[_MASK]}

    def plain_form(self, config: Config) -> Config:
        plain = super().plain_form(config)
        return plain if plain is config else {**plain, "pard_token": config["mask_token_id"]}

    def served_values(self, config: Config) -> Config:
        plain = self.plain_form(config)
        names = ("mask_token_id", "dspark_noise_token_id", "pard_token")  # go before it, in this order
        name = next((name for name in names if plain.get(name) is not None), _MASK)
        return {**super().served_values(config), _MASK: plain[name]}


class PEagle(Drafter):
    """P-EAGLE behind the interface of `drafters.base`."""

    head: PEagleHead
    MODULE = PEagleModel
    vllm = PEagleFiles()
    stops_at_rejection = True

    @property
    def shares(self) -> Tensor:
        """max(r^k, 0.2) at draft position k."""
        share = torch.full((self.num_positions, 1), self.head.depth_ratio).cumprod(0) / self.head.depth_ratio
        return share.clamp_min(_LEAST_SHARE)
