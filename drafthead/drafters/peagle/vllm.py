"""P-EAGLE heads as vLLM 0.32 reads them: EAGLE-3's files, the mask token and the mask state.

In the speculators layout vLLM does not copy `fc_norm` from beside the layer's keys, so it stands among them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from drafthead.drafters.base import DraftShape
from drafthead.drafters.eagle3 import vllm as eagle
from drafthead.drafters.eagle3.vllm import METHOD, checkpoint_tensors, exported_tensors
from drafthead.drafters.peagle.config import PEagleHead
from drafthead.drafters.vllm import Config
from drafthead.target.pieces import TargetSpec

__all__ = ["METHOD", "checkpoint_tensors", "exported_tensors"]
ALGORITHM = "P-EAGLE"
ARCHITECTURES = (
    "LlamaForCausalLMEagle3",
    "PEagleDraftModel",
    "PeagleLlamaForCausalLM",
)  # in config.json
_MASK = "ptd_token_id"
_SPECULATORS = "peagle"
# As `_BESIDE_LAYER` of drafters.eagle3.vllm.
_BESIDE_LAYER = {
    "draft_vocab_size": None, "target_hidden_size": None, "norm_before_residual": False, "norm_before_fc": False,
    eagle.LAYER_IDS: None,
}  # fmt: skip


def speculative_config(directory: Path | str, num_speculative_tokens: int) -> dict[str, Any]:
    """vLLM's --speculative-config for an exported head."""
    return {**eagle.speculative_config(directory, num_speculative_tokens), "parallel_drafting": True}


def plain_config(shape: DraftShape, aux_layer_ids: tuple[int, ...], dtype: str) -> Config:
    """config.json; arguments as of `drafters.eagle3.vllm.plain_config`."""
    assert isinstance(shape.head, PEagleHead)
    return {**eagle.plain_config(shape, aux_layer_ids, dtype), _MASK: shape.head.mask_token_id}


def speculators_config(config: Config, num_speculative_tokens: int, verifier: Config) -> Config:
    """config.json of the speculators layout; arguments as of `drafters.eagle3.vllm.speculators_config`."""
    found = eagle.speculators_config(config, num_speculative_tokens, verifier, _SPECULATORS, _BESIDE_LAYER)
    return {**found, "architectures": ["PEagleDraftModel"], "mask_token_id": config[_MASK]}


def served_values(config: Config) -> Config:
    """What vLLM makes of a config.json of either layout: its keys that decide what a head computes.

    Raises:
        KeyError: a key without a default is missing.
    """
    config = _plain_form(config)
    names = ("mask_token_id", "dspark_noise_token_id", "pard_token")  # go before it, in this order
    mask = next((config[name] for name in names if name in config), None) or config[_MASK]
    return {**eagle.served_values(config), _MASK: mask}


def _plain_form(config: Config) -> Config:
    plain = eagle.plain_form(config, _SPECULATORS, _BESIDE_LAYER)
    return plain if plain is config else {**plain, "pard_token": config["mask_token_id"]}


def describe(
    config: Config, tensors: Mapping[str, Tensor], spec: TargetSpec, layer_ids_are: str | None
) -> tuple[DraftShape, tuple[int, ...]]:
    """The shape of a public head and the ascending boundaries that it reads; as `drafters.eagle3.vllm.describe`."""
    own = {"type": "peagle", "mask_token_id": served_values(config)[_MASK]}
    return eagle.describe(_plain_form(config), tensors, spec, layer_ids_are, PEagleHead, **own)
