"""The recipe's head section for P-EAGLE (arXiv 2602.01469)."""

from typing import Literal

from drafthead.drafters.config import ParallelHead
from drafthead.drafters.eagle3.config import EagleHead


class PEagleHead(ParallelHead, EagleHead):
    """`head: {type: peagle, ...}`. `norm_output` must stay false: no draft position reads another's output."""

    type: Literal["peagle"]
    norm_output: Literal[False] = False
