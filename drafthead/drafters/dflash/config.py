"""The recipe's head section for DFlash (arXiv 2602.06036)."""

from typing import ClassVar, Literal

from pydantic import Field

from drafthead.drafters.config import HeadConfig


class BlockHead(HeadConfig):
    """What DFlash and DSpark share."""

    TRAINING_ONLY: ClassVar[frozenset[str]] = frozenset({"num_draft_positions", "position_decay"})

    mask_token_id: int = Field(ge=0)  # a token that no text contains; its embedding is the target's
    num_draft_positions: int = Field(default=7, gt=0)  # K drafts of a block
    position_decay: float | None = Field(default=4.0, gt=0)  # gamma: position k weighs exp(-k / gamma); None: all alike

    @property
    def num_positions(self) -> int:
        return self.num_draft_positions


class DFlashHead(BlockHead):
    """`head: {type: dflash, ...}`."""

    type: Literal["dflash"]
