"""DSpark heads as vLLM 0.32 reads them: DFlash's files with the Markov bias. vLLM serves them on GPUs only."""

from typing import Any

from drafthead.drafters.base import DraftShape
from drafthead.drafters.dflash.vllm import DFlashFiles
from drafthead.drafters.dspark.config import DSparkHead
from drafthead.drafters.vllm import Config

_RANK, _ANCHOR = "markov_rank", "sample_from_anchor"
_CONFIDENCE, _WITH_MARKOV = "enable_confidence_head", "confidence_head_with_markov"


class DSparkFiles(DFlashFiles):
    """Files of DSpark heads."""

    METHOD = TYPE = "dspark"
    ALGORITHM = "DSpark"
    ARCHITECTURES = ("Qwen3DSparkModel", "DSparkDraftModel")
    GPU_ONLY = True  # model runner V2 serves it, which needs one

    def plain_config(self, shape: DraftShape, aux_layer_ids: tuple[int, ...], dtype: str) -> Config:
        assert isinstance(shape.head, DSparkHead)
        return {
            **super().plain_config(shape, aux_layer_ids, dtype),
            "architectures": ["Qwen3DSparkModel"],
            _RANK: shape.head.markov_rank,
            "markov_head_type": "vanilla",
            "block_size": shape.head.num_draft_positions,
            _ANCHOR: True,
            _CONFIDENCE: shape.head.confidence,
            _WITH_MARKOV: True,
        }

    def served_values(self, config: Config) -> Config:
        return {
            **super().served_values(config),
            _RANK: config[_RANK],
            _ANCHOR: config.get(_ANCHOR, True),
            _CONFIDENCE: config.get(_CONFIDENCE, False),
            _WITH_MARKOV: config.get(_WITH_MARKOV, False),
        }

    def own_section(self, served: Config) -> dict[str, Any]:
        if not served[_ANCHOR]:
            raise ValueError(f"the head sets {_ANCHOR}=False, whose known token drafts nothing; supported: True")
        if served[_CONFIDENCE] and not served[_WITH_MARKOV]:
            raise ValueError(f"the head's confidence head ignores the Markov state; supported is {_WITH_MARKOV}=True")
        return {**super().own_section(served), _RANK: served[_RANK], "confidence": served[_CONFIDENCE]}
