"""The recipe's section on what is written for the serving engine."""

from typing import Literal

from drafthead.section import Section


class ExportConfig(Section):
    """What is written for the serving engine."""

    format: Literal["vllm", "speculators"] = "vllm"  # speculators: `vllm serve HEAD` finds the target by itself
    license: str | None = None  # for the model card; a Hugging Face licence id
