"""The model that prices any draft length at any load: speedup(b, K) = AL(K) / r(b, K).

AL(K) is the acceptance length, which hardly depends on the load, and r(b, K) the time of a speculative step over
that of a plain step with the same b requests in the batch. Measured once each, they price every pair, run or not.
Decode only: the wait for the first token is added where whole requests are priced (evaluation/pricing.py).

A speculative step costs what a plain one does, the drafter's passes, and K more tokens per request to verify:

    s(b, K) = base(b) + d0 + d1 · b + K · g + v · (W(b (K + 1)) - W(b)),    all coefficients >= 0

base(b) is interpolated between measured loads. W(n) is the target's work on n tokens, up to a factor: flat until
arithmetic outlasts the reading of weights and then linear (a ridge at n0 tokens), or a power of n below 1 where more
tokens share experts. The runs choose the shape. What this gives up is everything finer; the error on pairs that were
left out of the fit says what that costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import ArrayLike
from scipy.interpolate import make_interp_spline
from scipy.optimize import brentq

from drafthead.evaluation.decision.speed import AcceptanceCurve, SpeedPoint
from drafthead.statistics import Array, Interval


@dataclass(frozen=True)
class Work:
    """W(n): what n tokens in one step cost the target, up to a factor.

    Attributes:
        power: n^power, when there is no ridge.
        ridge: n0; a smooth maximum of n0 and n.
    """

    power: float = 1.0
    ridge: float | None = None

    def __call__(self, tokens: ArrayLike) -> Array:
        n = np.asarray(tokens, float)
        return n**self.power if self.ridge is None else (self.ridge**4 + n**4) ** 0.25

    def __str__(self) -> str:
        if self.ridge is not None:
            return f"flat up to about {self.ridge:.0f} tokens per step, then linear"
        return "linear in tokens" if self.power == 1 else f"tokens to the power {self.power:g}"


@dataclass(frozen=True)
class HeldOut:
    """A (load, K) pair predicted by a model that was fitted without it."""

    batch: float
    K: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class CostModel:
    """A fitted model of one drafter on one machine.

    Attributes:
        baseline: measured plain steps, ascending in batch.
        coefficients: d0, d1, g, v in seconds; 0 for one that the runs cannot tell.
        work: W.
        curve: AL(K).
        terms: which coefficients were fitted.
        batches, lengths: range of what was run with drafts.
        held_out: one entry per pair that could be left out.
    """

    baseline: tuple[SpeedPoint, ...]
    coefficients: dict[str, float]
    work: Work
    curve: AcceptanceCurve
    terms: tuple[str, ...]
    batches: tuple[float, float]
    lengths: tuple[int, ...]
    held_out: tuple[HeldOut, ...] = field(default=())

    def base_step_s(self, batch: float) -> float:
        """Seconds of a plain step."""
        return float(interpolated([p.batch for p in self.baseline], [p.step_s for p in self.baseline], batch))

    def step_ratio(self, batch: float, K: int) -> float:
        """r(b, K), which is also the acceptance length at which drafting neither pays nor costs.

        Above K + 1 no head can pay. At K = 0 the drafter's first pass still runs.
        """
        return float(self.step_ratios([batch], [K])[0])

    def step_ratios(self, batch: ArrayLike, K: ArrayLike) -> Array:
        """r at N pairs, (N,)."""
        extra = sum(self.coefficients[name] * value for name, value in terms_of(self.work, batch, K).items())
        return 1.0 + extra / interpolated([p.batch for p in self.baseline], [p.step_s for p in self.baseline], batch)

    def speedup(self, batch: float, K: int) -> float:
        """Tokens per second while decoding, relative to no speculation."""
        return self.curve.length(K) / self.step_ratio(batch, K)

    def best_draft(self, batch: float, among: Sequence[int] | None = None) -> int:
        """The draft length that decodes fastest in a schedule; 0 where none pays.

        With a schedule K = 0 still pays for the drafter's first pass, so it is compared as such.

        Args:
            batch: requests in the batch.
            among: lengths to choose from; None: all whose acceptance is known.
        """
        lengths = self.curve.known if among is None else among
        return max({0, *lengths}, key=lambda K: (self.speedup(batch, K), -K))

    def crossover(self, K: int, largest: float) -> float:
        """The load from which on drafting K tokens no longer pays.

        Args:
            K: draft tokens.
            largest: how far to look; infinity comes out when it still pays there, and 0 when it never does.
        """
        at = np.geomspace(1, largest, 64)
        pays = np.array([self.speedup(b, K) for b in at]) > 1
        if pays[-1]:
            return np.inf
        if not pays.any():
            return 0.0
        last = int(np.flatnonzero(pays)[-1])
        return float(brentq(lambda b: self.speedup(b, K) - 1, at[last], at[last + 1]))

    def extrapolates(self, batch: float, K: int) -> bool:
        """Whether the pair lies outside what was run."""
        return not (self.batches[0] <= batch <= self.batches[1] and min(self.lengths) <= K <= max(self.lengths))

    @property
    def error(self) -> float | None:
        """Root mean square of the logarithm of predicted / measured on held-out pairs; None when none could be."""
        if not self.held_out:
            return None
        logs = [np.log(h.predicted / h.measured) for h in self.held_out]
        return float(np.sqrt(np.mean(np.square(logs))))

    def widened(self, interval: Interval) -> Interval:
        """An interval over prompts with the model's own error added in quadrature, on the scale of logarithms."""
        model = 1.96 * (self.error or 0.0)
        below, above = np.log(interval.value / interval.low), np.log(interval.high / interval.value)
        low, high = np.exp(-np.hypot(below, model)), np.exp(np.hypot(above, model))
        return Interval(interval.value, float(interval.value * low), float(interval.value * high))


def terms_of(work: Work, batch: ArrayLike, K: ArrayLike) -> dict[str, Array]:
    """What each coefficient multiplies."""
    batch, K = np.asarray(batch, float), np.asarray(K, float)
    return {"d0": np.ones_like(K), "d1": batch, "g": K, "v": work(batch * (K + 1)) - work(batch)}


def interpolated(x: ArrayLike, y: ArrayLike, at: ArrayLike) -> Array:
    """Linear between points and beyond them; constant where there is one point. Equal x are averaged."""
    x, y = np.asarray(x, float), np.asarray(y, float)
    distinct, index = np.unique(x, return_inverse=True)
    mean = np.bincount(index, y) / np.bincount(index)
    if len(distinct) == 1:
        return np.full_like(np.asarray(at, float), mean[0])
    # Never below the shortest step seen: a line through two noisy points may fall.
    return np.maximum(make_interp_spline(distinct, mean, k=1)(at), mean.min())
