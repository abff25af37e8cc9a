"""The recipe's head section for DSpark (arXiv 2607.05147)."""

from typing import Literal

from pydantic import Field

from drafthead.drafters.dflash.config import BlockHead


class DSparkHead(BlockHead):
    """`head: {type: dspark, ...}`."""

    type: Literal["dspark"]
    markov_rank: int = Field(default=256, gt=0)  # r of the bias: a token's r numbers times r columns of the vocabulary
    confidence: bool = True  # a head that predicts acceptance, which vLLM's adaptive verification reads
