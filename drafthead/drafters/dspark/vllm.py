"""DSpark heads as vLLM 0.32 reads them: DFlash's files with the Markov bias. vLLM serves them on GPUs only."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from drafthead.drafters.base import DraftShape
from drafthead.drafters.dflash import vllm as dflash
from drafthead.drafters.dflash.vllm import checkpoint_tensors, exported_tensors, speculators_config
from drafthead.drafters.dspark.config import DSparkHead
from drafthead.drafters.vllm import Config
from drafthead.target.pieces import TargetSpec

__all__ = ["checkpoint_tensors", "exported_tensors", "speculators_config"]
METHOD = "dspark"  # of --speculative-config
ALGORITHM = "DSpark"
ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")  # in config.json
GPU_ONLY = True  # model runner V2 serves it, which needs one
_RANK = "markov_rank"
_CONFIDENCE, _WITH_MARKOV = "enable_confidence_head", "confidence_head_with_markov"


def speculative_config(directory: Path | str, num_speculative_tokens: int) -> dict[str, Any]:
    """vLLM's --speculative-config for an exported head."""
    return {"method": METHOD, "model": str(directory), "num_speculative_tokens": num_speculative_tokens}


def plain_config(shape: DraftShape, aux_layer_ids: tuple[int, ...], dtype: str) -> Config:
    """config.json; arguments as of `drafters.dflash.vllm.plain_config`."""
    assert isinstance(shape.head, DSparkHead)
    return {
        **dflash.plain_config(shape, aux_layer_ids, dtype),
        "architectures": ["Qwen3DSparkModel"],
        _RANK: shape.head.markov_rank,
        "markov_head_type": "vanilla",
        "block_size": shape.head.num_draft_positions,
        "sample_from_anchor": True,
        _CONFIDENCE: shape.head.confidence,
        _WITH_MARKOV: True,
    }


def served_values(config: Config) -> Config:
    """What vLLM makes of a config.json: its keys that decide what a head computes."""
    return {
        **dflash.served_values(config),
        _RANK: config[_RANK],
        "sample_from_anchor": config.get("sample_from_anchor", True),
        _CONFIDENCE: config.get(_CONFIDENCE, False),
        _WITH_MARKOV: config.get(_WITH_MARKOV, False),
    }


def describe(
    config: Config, tensors: Mapping[str, Tensor], spec: TargetSpec, layer_ids_are: str | None
) -> tuple[DraftShape, tuple[int, ...]]:
    """The shape of a public head and the boundaries that it reads; as `drafters.dflash.vllm.describe`.

    Raises:
        ValueError: also where the known token's slot makes no draft.
    """
    if not config.get("sample_from_anchor", True):
        raise ValueError("the head sets sample_from_anchor=False; supported is True")
    confidence = config.get(_CONFIDENCE, False)
    if confidence and not config.get(_WITH_MARKOV, False):
        raise ValueError(f"the head's confidence head does not read the Markov state; supported is {_WITH_MARKOV}=True")
    own = {"type": "dspark", _RANK: config.get(_RANK), "confidence": confidence}
    return dflash.describe(config, tensors, spec, layer_ids_are, DSparkHead, **own)
