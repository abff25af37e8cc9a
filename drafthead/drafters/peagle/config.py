"""The recipe's head section for P-EAGLE (arXiv 2602.01469)."""

from typing import ClassVar, Literal

from pydantic import Field

from drafthead.drafters.eagle3.config import EagleHead


class PEagleHead(EagleHead):
    """`head: {type: peagle, ...}`. `norm_output` must stay false: no draft position reads another's output."""

    TRAINING_ONLY: ClassVar[frozenset[str]] = frozenset({"num_draft_positions"})

    type: Literal["peagle"]
    mask_token_id: int = Field(ge=0)  # a token that no text contains
    num_draft_positions: int = Field(default=7, gt=0)  # K: the first reads the target's state, the others a mask
    norm_output: Literal[False] = False

    @property
    def num_positions(self) -> int:
        return self.num_draft_positions
