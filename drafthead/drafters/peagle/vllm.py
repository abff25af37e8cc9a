"""P-EAGLE heads as vLLM 0.32 reads them: EAGLE-3's files, the mask token and the mask state. Plain layout only.

The speculators layout of P-EAGLE drops `fc_norm`, which would be served as if the head had none.
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


def speculative_config(directory: Path | str, num_speculative_tokens: int) -> dict[str, Any]:
    """vLLM's --speculative-config for an exported head."""
    return {**eagle.speculative_config(directory, num_speculative_tokens), "parallel_drafting": True}


def plain_config(shape: DraftShape, aux_layer_ids: tuple[int, ...], dtype: str) -> Config:
    """config.json; arguments as of `drafters.eagle3.vllm.plain_config`."""
    assert isinstance(shape.head, PEagleHead)
    return {**eagle.plain_config(shape, aux_layer_ids, dtype), _MASK: shape.head.mask_token_id}


def speculators_config(config: Config, num_speculative_tokens: int, verifier: Config) -> Config:
    """Not written.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"export.format speculators: {ALGORITHM} heads are exported in the plain layout; set it to vllm")


def served_values(config: Config) -> Config:
    """What vLLM makes of a plain config.json: its keys that decide what a head computes.

    Raises:
        KeyError: a key without a default is missing.
    """
    names = ("mask_token_id", "dspark_noise_token_id", "pard_token")  # go before it, in this order
    mask = next((config[name] for name in names if name in config), None) or config[_MASK]
    return {**eagle.served_values(config), _MASK: mask}


def describe(
    config: Config, tensors: Mapping[str, Tensor], spec: TargetSpec, layer_ids_are: str | None
) -> tuple[DraftShape, tuple[int, ...]]:
    """The shape of a public head and the ascending boundaries that it reads; as `drafters.eagle3.vllm.describe`."""
    own = {"type": "peagle", "mask_token_id": served_values(config)[_MASK]}
    return eagle.describe(config, tensors, spec, layer_ids_are, PEagleHead, **own)
