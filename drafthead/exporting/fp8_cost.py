"""What fp8 weights cost in acceptance length, on the validation answers of the very head that is exported.

Weights alone are compared: rounds replayed with the file's weights multiplied out, against those with the same weights
in bf16, paired by prompt. That an engine rounds activations too is in the counters of the serving check.
"""

from dataclasses import dataclass

from torch import Tensor

from drafthead.config import Recipe
from drafthead.drafters.base import DraftShape
from drafthead.drafters.replay import Acceptance
from drafthead.exporting.answers import validation_answers
from drafthead.exporting.contract import as_served
from drafthead.statistics import Interval, length_difference


@dataclass(frozen=True)
class Fp8Cost:
    """Acceptance lengths of both kinds of weights.

    Attributes:
        prompts: that both were replayed over.
        bf16, fp8: acceptance lengths.
        change: fp8 minus bf16, tokens per round.
        low, high: its 95 % bootstrap interval over prompts.
    """

    prompts: int
    bf16: float
    fp8: float
    change: float
    low: float
    high: float

    def sentence(self) -> str:
        """For the terminal."""
        return (
            f"fp8 weights: predicted acceptance length {self.fp8:.3f}, in bf16 {self.bf16:.3f}; difference "
            f"{self.change:+.4f} [{self.low:+.4f}, {self.high:+.4f}] over {self.prompts} validation prompts"
        )


def measure_fp8_cost(
    recipe: Recipe, weights: dict[str, Tensor], shape: DraftShape, aux_layer_ids: tuple[int, ...]
) -> Fp8Cost:
    """Replay the answers of the serving check with both kinds of weights.

    Args:
        recipe: target, engine, validation states and K.
        weights: of the checkpoint, float32, with d2t and t2d.
        shape: of the trained head.
        aux_layer_ids: it was trained on.

    Raises:
        ArtefactError: there are no validation states to replay.
    """
    answers = validation_answers(recipe, aux_layer_ids)
    bf16, fp8 = (answers.rounds(as_served(weights, dtype), shape) for dtype in ("bfloat16", "fp8"))
    found = paired_difference(fp8, bf16)
    return Fp8Cost(len(bf16), pooled(bf16).length, pooled(fp8).length, found.value, found.low, found.high)


def pooled(rounds: list[Acceptance]) -> Acceptance:
    """Counters of all prompts together."""
    return sum(rounds[1:], start=rounds[0])


def paired_difference(rounds: list[Acceptance], other: list[Acceptance]) -> Interval:
    """Acceptance length minus the other's, paired by prompt."""
    drafts, other_drafts = ([a.drafts for a in arm] for arm in (rounds, other))
    accepted, other_accepted = ([a.accepted for a in arm] for arm in (rounds, other))
    return length_difference(drafts, accepted, other_drafts, other_accepted)
