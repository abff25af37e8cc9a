"""The recipe's head section for DFlash (arXiv 2602.06036)."""

from typing import ClassVar, Literal

from pydantic import Field

from drafthead.drafters.config import ParallelHead


class BlockHead(ParallelHead):
    """What DFlash and DSpark share."""

    TRAINING_ONLY: ClassVar[frozenset[str]] = ParallelHead.TRAINING_ONLY | {"position_decay", "anchor_share"}

    position_decay: float | None = Field(default=4.0, gt=0)  # gamma: position k weighs exp(-k / gamma); None: all alike
    causal: bool = True  # a slot sees the block up to itself, so its draft is the same at any K; False: all of it
    attention_sinks: bool = False  # every query head may attend to nothing, by a score that is learned, as gpt-oss's do
    anchor_share: float = Field(default=1.0, gt=0, le=1)  # of the roots, drawn anew in each epoch, that are trained on


class DFlashHead(BlockHead):
    """`head: {type: dflash, ...}`."""

    type: Literal["dflash"]
