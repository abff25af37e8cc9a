"""The draft vocabulary: the few thousand target tokens that a head can propose.

Two maps tie it to the target's vocabulary, as every serving engine expects them:
    d2t (D,) int64: target id = draft id + d2t[draft id]   (offsets, not ids)
    t2d (V,) bool:  whether a target token can be proposed
Draft ids follow ascending target ids.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_MULTIPLE = 64


@dataclass(frozen=True)
class DraftVocabulary:
    """D draft tokens out of V target tokens.

    Attributes:
        d2t: (D,) int64 offsets from draft id to target id.
        t2d: (V,) bool, target tokens that are draft tokens.
    """

    d2t: Tensor
    t2d: Tensor

    @property
    def target_ids(self) -> Tensor:
        """(D,) int64, the target id of every draft id."""
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)


def choose_vocabulary(counts: Tensor, size: int, required: Tensor) -> DraftVocabulary:
    """The `size` most frequent target tokens, among them all that are `required`.

    Args:
        counts: (V,) how often each target token was generated.
        size: D, size of the draft vocabulary.
        required: ids that must be in whatever their count (the template's special tokens).

    Raises:
        ValueError: `required` alone exceeds `size`.
    """
    vocab_size = counts.shape[0]
    if required.shape[0] > size:
        raise ValueError(
            f"head.draft_vocab_size {size} is smaller than the {required.shape[0]} special tokens that must be in it"
        )
    ranked = counts.clone().to(torch.float64)
    ranked[required] = float("inf")
    chosen = ranked.argsort(descending=True, stable=True)[:size].sort().values
    t2d = torch.zeros(vocab_size, dtype=torch.bool)
    t2d[chosen] = True
    return DraftVocabulary(d2t=chosen - torch.arange(size), t2d=t2d)


def size_for_coverage(counts: Tensor, share: float, required: Tensor) -> int:
    """The fewest target tokens that make up `share` of the generated ones, `required` among them.

    Rounded up to a multiple of 64, which matrix products and a vocabulary split over GPUs ask for.

    Args:
        counts: (V,) how often each target token was generated.
        share: share of generated tokens to cover, in (0, 1].
        required: ids that must be in whatever their count.

    Raises:
        ValueError: nothing was generated.
    """
    total = int(counts.sum())
    if total == 0:
        raise ValueError("head.coverage cannot be reached: the target generated no token; check the responses")
    optional = counts.clone()
    optional[required] = 0
    # Covered by the required tokens and the n most frequent others, n = 0, 1, ...
    most_frequent = torch.cat([optional.new_zeros(1), optional.sort(descending=True).values.cumsum(0)])
    covered = counts[required].sum() + most_frequent
    needed = required.shape[0] + int((covered.double() < share * total * (1 - 1e-9)).sum())
    return min(-(-needed // _MULTIPLE) * _MULTIPLE, counts.shape[0])


def coverage(counts: Tensor, vocabulary: DraftVocabulary) -> float:
    """Share of generated tokens that the draft vocabulary can propose."""
    return float(counts[vocabulary.t2d].sum() / counts.sum().clamp_min(1))
