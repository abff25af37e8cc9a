"""The recipe's section on what is written for the serving engine."""

from typing import Literal

from pydantic import Field

from drafthead.section import Section


class ExportConfig(Section):
    """What is written for the serving engine."""

    dtype: Literal["bfloat16", "float32", "fp8"] = "bfloat16"  # fp8: projections only; what it costs is measured
    format: Literal["vllm", "speculators"] = "vllm"  # speculators: `vllm serve HEAD` finds the target by itself
    max_position_embeddings: int | None = Field(default=None, gt=0)  # None: the target's
    # Longest position the head was trained on: rotate by YaRN from there to max_position_embeddings.
    yarn_from: int | None = Field(default=None, gt=0)
    license: str | None = None  # for the model card; a Hugging Face licence id
