"""P-EAGLE heads as vLLM 0.32 reads them: EAGLE-3's files, the mask token and the mask state.

In the speculators layout vLLM does not copy `fc_norm` from beside the layer's keys, so it stands among them.
"""

from pathlib import Path
from typing import Any, ClassVar

from drafthead.drafters.base import DraftShape
from drafthead.drafters.eagle3.vllm import LAYER_IDS, Eagle3Files
from drafthead.drafters.peagle.config import PEagleHead
from drafthead.drafters.vllm import Config

_MASK = "ptd_token_id"


class PEagleFiles(Eagle3Files):
    """Files of P-EAGLE heads."""

    TYPE = "peagle"
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
        found = super().speculators_config(config, num_speculative_tokens, verifier)
        return {**found, "mask_token_id": config[_MASK]}

    def plain_form(self, config: Config) -> Config:
        plain = super().plain_form(config)
        return plain if plain is config else {**plain, "pard_token": config["mask_token_id"]}

    def served_values(self, config: Config) -> Config:
        plain = self.plain_form(config)
        names = ("mask_token_id", "dspark_noise_token_id", "pard_token")  # go before it, in this order
        mask = next((plain[name] for name in names if name in plain), None) or plain[_MASK]
        return {**super().served_values(config), _MASK: mask}

    def own_section(self, served: Config) -> dict[str, Any]:
        return {**super().own_section(served), "mask_token_id": served[_MASK]}
