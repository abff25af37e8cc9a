"""The recipe's sections on the target and on the engine that runs it."""

from typing import Literal, Self

from pydantic import Field, model_validator

from drafthead.section import Section


class TargetConfig(Section):
    """The frozen model that verifies, and where its hidden states are read."""

    path: str  # a directory (relative to the checkout or absolute) or a hub id
    revision: str | None = None
    dtype: Literal["bfloat16", "float32", "auto"] = "bfloat16"
    # Boundary indices, ascending: id k is the input of block k, vLLM's own numbering.
    aux_layer_ids: tuple[int, ...]
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _check_layer_ids(self) -> Self:
        if (
            not self.aux_layer_ids
            or list(self.aux_layer_ids) != sorted(set(self.aux_layer_ids))
            or self.aux_layer_ids[0] < 0
        ):
            raise ValueError(
                f"target.aux_layer_ids {list(self.aux_layer_ids)} must be ascending, distinct and not negative: "
                "vLLM sorts them, which would silently permute the columns of fc"
            )
        return self


class EngineConfig(Section):
    """vLLM settings shared by regeneration, harvesting and evaluation."""

    max_model_len: int = Field(gt=0)
    max_num_seqs: int = Field(default=64, gt=0)
    max_num_batched_tokens: int | None = Field(default=None, gt=0)  # None: vLLM's own choice
    tensor_parallel_size: int = Field(default=1, gt=0)
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)  # on CPU: VLLM_CPU_KVCACHE_SPACE, in GiB
