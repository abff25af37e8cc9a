"""The recipe's head section for EAGLE-3 (arXiv 2503.01840); with `fc_norm` and `norm_output`, EAGLE-3.1."""

from typing import ClassVar, Literal

from pydantic import Field

from drafthead.drafters.config import HeadConfig


class EagleHead(HeadConfig):
    """What EAGLE-3 and P-EAGLE share: where norms stand."""

    norm_before_residual: bool = False
    norm_before_fc: bool = True
    fc_norm: bool = False
    norm_output: bool = False


class Eagle3Head(EagleHead):
    """`head: {type: eagle3, ...}`."""

    TRAINING_ONLY: ClassVar[frozenset[str]] = frozenset({"num_ttt_steps", "step_weight_decay", "feature_weight"})

    type: Literal["eagle3"]
    num_ttt_steps: int = Field(default=4, gt=0)  # K unrolled steps of training-time test
    step_weight_decay: float = Field(default=0.8, gt=0, le=1)  # weight of TTT step k is decay**k
    # Of the squared error of what a step hands on, beside the feature that it stands for; of the last step too, which
    # hands on where more is served than trained.
    feature_weight: float = Field(default=0, ge=0)

    @property
    def num_positions(self) -> int:
        return self.num_ttt_steps
