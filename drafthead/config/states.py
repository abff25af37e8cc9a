"""The recipe's section on the store of hidden states."""

from typing import Literal, Self

from pydantic import Field, model_validator

from drafthead.section import Section


class StatesConfig(Section):
    """How hidden states are harvested."""

    backend: Literal["vllm", "transformers"] = "vllm"
    # Of the aux layers; fp8: e4m3 with one scale per token and aux layer, half the bytes of bf16.
    format: Literal["bf16", "fp8"] = "fp8"
    sequences_per_shard: int = Field(default=1024, gt=0)
    # Online mode: at most this many training shards on disk at once, harvested while training reads them.
    spool_shards: int | None = Field(default=None, ge=2)  # None: the whole store is harvested first, and kept
    one_pass: bool = False  # capture the states while the target generates, instead of reading its responses once more

    @model_validator(mode="after")
    def _check_one_pass(self) -> Self:
        if self.one_pass and (self.backend != "vllm" or self.spool_shards is not None):
            raise ValueError(
                f"one_pass captures inside vLLM and into a whole store: states.backend {self.backend} and "
                f"states.spool_shards {self.spool_shards} do not go with it; set one_pass to false"
            )
        return self
