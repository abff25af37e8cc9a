"""DFlash heads as vLLM 0.32 reads them: config.json and names of tensors, in both directions. Plain layout only.

`target_layer_ids` count blocks from 0: one less than the boundaries of this project, and of vLLM inside.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from drafthead.drafters.base import DraftShape
from drafthead.drafters.dflash.config import BlockHead, DFlashHead
from drafthead.drafters.vllm import (
    Config,
    decoder_config,
    decoder_section,
    read_tensors,
    served_decoder,
    written_tensors,
)
from drafthead.target.pieces import TargetSpec
from drafthead.target.rope import rope_parameters_of

METHOD = "dflash"  # of --speculative-config
ALGORITHM = "DFlash"
ARCHITECTURES = ("DFlashDraftModel",)  # in config.json
_OWN = "dflash_config"


def speculative_config(directory: Path | str, num_speculative_tokens: int) -> dict[str, Any]:
    """vLLM's --speculative-config for an exported head."""
    return {"method": METHOD, "model": str(directory), "num_speculative_tokens": num_speculative_tokens}


def plain_config(shape: DraftShape, aux_layer_ids: tuple[int, ...], dtype: str) -> Config:
    """config.json.

    Args:
        shape: of the head, with the positions and the rotation to be served.
        aux_layer_ids: ascending boundary indices.
        dtype: of the weights, by torch's name.
    """
    assert isinstance(shape.head, BlockHead)
    blocks = [i - 1 for i in aux_layer_ids]
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        **decoder_config(shape, dtype),
        _OWN: {"mask_token_id": shape.head.mask_token_id, "target_layer_ids": blocks, "causal": False},
        "bos_token_id": None,
        "eos_token_id": None,
    }


def speculators_config(config: Config, num_speculative_tokens: int, verifier: Config) -> Config:
    """Not written.

    Raises:
        ValueError: always.
    """
    raise ValueError(f"export.format speculators: {ALGORITHM} heads are exported in the plain layout; set it to vllm")


def served_values(config: Config) -> Config:
    """What vLLM makes of a config.json: its keys that decide what a head computes.

    Raises:
        KeyError: a key without a default is missing.
    """
    own = config[_OWN]
    return {
        **served_decoder(config),
        f"{_OWN}.mask_token_id": own["mask_token_id"],
        f"{_OWN}.target_layer_ids": own["target_layer_ids"],
        f"{_OWN}.causal": bool(config.get("is_causal", own.get("causal", False))),
    }


def describe(
    config: Config, tensors: Mapping[str, Tensor], spec: TargetSpec, layer_ids_are: str | None,
    section: type[BlockHead] = DFlashHead, **own: Any,
) -> tuple[DraftShape, tuple[int, ...]]:  # fmt: skip
    """The shape of a public head and the ascending boundaries that it reads.

    Args:
        config: config.json.
        tensors: by checkpoint names; the number of aux layers is the width of fc.
        spec: of the target.
        layer_ids_are: "boundaries" where a file that counts them so is to be corrected.
        section: of the recipe that describes it.
        own: that section's further fields.

    Raises:
        ValueError: the head is not for this target, or uses what is not computed here.
    """
    try:
        served, num_aux_layers = served_values(config), tensors["fc.weight"].shape[1] // spec.hidden_size
    except KeyError as error:
        raise ValueError(f"the head has no {error}: is it a {ALGORITHM} head?") from error
    if served[f"{_OWN}.causal"]:
        raise ValueError(f"the head's blocks are causal; supported are {ALGORITHM} heads with causal: false")
    ids = served[f"{_OWN}.target_layer_ids"]
    if len(ids) != num_aux_layers:
        raise ValueError(f"config.json names aux layers {ids}, but fc reads {num_aux_layers}")
    fields = {**decoder_section(served, spec), "mask_token_id": served[f"{_OWN}.mask_token_id"]}
    shape = DraftShape(
        section(**{"type": "dflash", **fields, **own}), spec.hidden_size, spec.vocab_size, num_aux_layers,
        served["rms_norm_eps"], rope_parameters_of(config), served["max_position_embeddings"],
    )  # fmt: skip
    return shape, tuple(ids) if layer_ids_are == "boundaries" else tuple(i + 1 for i in ids)


def exported_tensors(
    weights: dict[str, Tensor], shape: DraftShape, dtype: str, layout: str = "vllm"
) -> dict[str, Tensor]:
    """A checkpoint's tensors as a file of that dtype holds them, under the same names."""
    return written_tensors(weights, shape, dtype)


def checkpoint_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A file's tensors under the names of a checkpoint."""
    return read_tensors(tensors)
