"""DFlash heads as vLLM 0.32 reads them: config.json and names of tensors, in both directions. Plain layout only.

`target_layer_ids` count blocks from 0: one less than the boundaries of this project, and of vLLM inside.
"""

from typing import Any

from drafthead.drafters.base import DraftShape
from drafthead.drafters.dflash.config import BlockHead
from drafthead.drafters.vllm import Config, HeadFiles, decoder_config, served_decoder

_OWN = "dflash_config"


class DFlashFiles(HeadFiles):
    """Files of DFlash heads."""

    METHOD = TYPE = "dflash"
    ALGORITHM = "DFlash"
    ARCHITECTURES: tuple[str, ...] = ("DFlashDraftModel",)

    def plain_config(self, shape: DraftShape, aux_layer_ids: tuple[int, ...], dtype: str) -> Config:
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

    def served_values(self, config: Config) -> Config:
        own = config[_OWN]
        return {
            **served_decoder(config),
            f"{_OWN}.mask_token_id": own["mask_token_id"],
            f"{_OWN}.target_layer_ids": own["target_layer_ids"],
            f"{_OWN}.causal": bool(config.get("is_causal", own.get("causal", False))),
        }

    def own_section(self, served: Config) -> dict[str, Any]:
        if served[f"{_OWN}.causal"]:
            raise ValueError(f"the head's blocks are causal; supported are {self.ALGORITHM} heads with causal: false")
        return {"mask_token_id": served[f"{_OWN}.mask_token_id"]}

    def boundaries(self, served: Config, num_layers: int, layer_ids_are: str | None) -> list[int]:
        """`layer_ids_are` "boundaries": the file counts them so, and is corrected."""
        ids = served[f"{_OWN}.target_layer_ids"]
        return ids if layer_ids_are == "boundaries" else [i + 1 for i in ids]
