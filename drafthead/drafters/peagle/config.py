"""The recipe's head section for P-EAGLE (arXiv 2602.01469)."""

from typing import ClassVar, Literal

from pydantic import Field

from drafthead.drafters.config import ParallelHead
from drafthead.drafters.eagle3.config import EagleHead


class PEagleHead(ParallelHead, EagleHead):
    """`head: {type: peagle, ...}`. `norm_output` must stay false: no draft position reads another's output."""

    TRAINING_ONLY: ClassVar[frozenset[str]] = ParallelHead.TRAINING_ONLY | {"depth_ratio"}

    type: Literal["peagle"]
    depth_ratio: float = Field(default=0.7, gt=0, le=1)  # r: draft position k is trained on r^k of the rows
    norm_output: Literal[False] = False
