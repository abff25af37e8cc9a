"""DFlash heads as vLLM 0.32 reads them: config.json and names of tensors, in both directions. Plain layout only.

`target_layer_ids` count blocks from 0: one less than the boundaries of this project, and of vLLM inside.
"""

from typing import Any

from drafthead.drafters.base import DraftShape
from drafthead.drafters.dflash.config import BlockHead
from drafthead.drafters.vllm import WINDOWED, Config, HeadFiles, decoder_config, served_decoder

_OWN = "dflash_config"


class DFlashFiles(HeadFiles):
    """Files of DFlash heads."""

    METHOD = TYPE = "dflash"
    ALGORITHM = "DFlash"
    ARCHITECTURES: tuple[str, ...] = ("DFlashDraftModel",)

    def plain_config(self, shape: DraftShape, aux_layer_ids: tuple[int, ...], dtype: str) -> Config:
        assert isinstance(shape.head, BlockHead)
        own = {"mask_token_id": shape.head.mask_token_id, "target_layer_ids": [i - 1 for i in aux_layer_ids]}
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **decoder_config(shape, dtype),
            _OWN: {**own, "causal": shape.head.causal},
            "bos_token_id": None,
            "eos_token_id": None,
        }

    def served_values(self, config: Config) -> Config:
        own = config[_OWN]
        stated = (config.get("is_causal"), own.get("causal"), WINDOWED in (config.get("layer_types") or ()))
        if own.get("use_swa"):
            config = config | {"layer_types": [WINDOWED]}
        if "swa_window_size" in own:
            config = config | {"sliding_window": own["swa_window_size"]}
        return {
            **served_decoder(config),
            f"{_OWN}.mask_token_id": own["mask_token_id"],
            f"{_OWN}.target_layer_ids": own["target_layer_ids"],
            f"{_OWN}.causal": next(bool(causal) for causal in stated if causal is not None),
        }

    def own_section(self, served: Config) -> dict[str, Any]:
        return {name: served[f"{_OWN}.{name}"] for name in ("mask_token_id", "causal")}

    def boundaries(self, served: Config, num_layers: int, layer_ids_are: str | None) -> list[int]:
        """`layer_ids_are` "boundaries": the file counts them so, and is corrected."""
        ids = served[f"{_OWN}.target_layer_ids"]
        return ids if layer_ids_are == "boundaries" else [i + 1 for i in ids]
