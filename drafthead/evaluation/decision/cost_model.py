"""The model that prices any draft length at any load: speedup(b, K) = AL(K) / r(b, K).

AL(K) is the acceptance length, which hardly depends on the load, and r(b, K) the time of a speculative step over
that of a plain step with the same b requests in the batch. Measured once each, they price every pair, run or not.
Decode only: the wait for the first token is not in it.

A speculative step costs what a plain one does, the drafter's passes, and K more tokens per request to verify:

    s(b, K) = base(b) + d0 + d1 · b + K · g + v · (W(b (K + 1)) - W(b)),    all coefficients >= 0

base(b) is interpolated between measured loads. W(n) is the target's work on n tokens, up to a factor: flat until
arithmetic outlasts the reading of weights and then linear (a ridge at n0 tokens), or a power of n below 1 where more
tokens share experts. The runs choose the shape. What this gives up is everything finer; the error on pairs that were
left out of the fit says what that costs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike
from scipy.interpolate import make_interp_spline
from scipy.optimize import brentq, nnls

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


# Fitting the cost model to runs, and to resamplings of their prompts; every pair is predicted by a fit without it.


_POWERS = (1.0, 0.75, 0.5)
_RIDGES = 12
# A term joins when it adds rank, in this order.
_TERMS = ("g", "v", "d0", "d1")


def fit(points: Sequence[SpeedPoint], positions: Sequence[float] = ()) -> CostModel:
    """Fit the model and predict every pair that can be left out.

    Args:
        points: plain steps (K None) and drafted ones; several of one (batch, K) are averaged by the fit.
        positions: joint prefix acceptance at the largest K, for draft lengths that were not run.

    Raises:
        ValueError: there is no plain or no drafted step.
    """
    baseline, drafted = _split(points)
    model = _fit(baseline, drafted, tuple(positions))
    pairs = sorted({(p.batch, p.K) for p in drafted if p.K})
    found = [_predict_left_out(model, baseline, drafted, pair) for pair in pairs]
    return replace(model, held_out=tuple(h for h in found if h is not None))


def refit(model: CostModel, points: Sequence[SpeedPoint]) -> CostModel:
    """The same shape and acceptance fitted to resampled points, without leaving anything out."""
    baseline, drafted = _split(points)
    return replace(_fit(baseline, drafted, model.curve.positions, model.work), curve=model.curve)


def _split(points: Sequence[SpeedPoint]) -> tuple[tuple[SpeedPoint, ...], list[SpeedPoint]]:
    baseline = tuple(sorted((p for p in points if p.K is None), key=lambda p: p.batch))
    drafted = [p for p in points if p.K is not None]
    if not baseline or not drafted:
        raise ValueError(
            f"the cost model needs runs without and with drafts, found {len(baseline)} and {len(drafted)}; "
            "run: python eval/serving.py RECIPE"
        )
    return baseline, drafted


def _predict_left_out(
    model: CostModel, baseline: tuple[SpeedPoint, ...], drafted: Sequence[SpeedPoint], pair: tuple[float, int]
) -> HeldOut | None:
    """One pair, by a fit without it; None where what is left knows too little of it to carry the same model."""
    batch, K = pair
    inside = [p for p in drafted if (p.batch, p.K) != pair]
    outside = [p for p in drafted if (p.batch, p.K) == pair]
    if not any(p.K for p in inside):
        return None
    positions = model.curve.positions
    without = _fit(baseline, inside, positions)
    # The positions of the longest draft come from its own runs.
    of_itself = len(positions) == K and K not in without.curve.measured
    if of_itself or K not in without.curve.known or set(without.terms) != set(model.terms):
        return None
    measured = without.base_step_s(batch) / float(np.mean([p.tpot_s for p in outside]))
    return HeldOut(batch, K, measured, without.speedup(batch, K))


def _fit(
    baseline: tuple[SpeedPoint, ...],
    drafted: Sequence[SpeedPoint],
    positions: tuple[float, ...],
    work: Work | None = None,
) -> CostModel:
    batch = np.array([p.batch for p in drafted])
    K = np.array([p.K for p in drafted], float)
    step = np.array([p.step_s for p in drafted])
    extra = step - interpolated([p.batch for p in baseline], [p.step_s for p in baseline], batch)
    shapes = [work] if work else _shapes(batch, K)
    fits = [(*_least_squares(batch, K, extra, step, shape), shape) for shape in shapes]
    # The first of those that fit about as well: the plain ones come first.
    closest = min(residual for _, residual, _, _ in fits)
    coefficients, _, terms, work = next(found for found in fits if found[1] <= 1.02 * closest + 1e-12)
    lengths = {int(k): float(np.mean([p.length for p in drafted if k == p.K])) for k in sorted(set(K)) if k > 0}
    return CostModel(
        baseline, coefficients, work, AcceptanceCurve(lengths, positions), terms,
        (float(batch.min()), float(batch.max())), tuple(sorted({int(k) for k in K})),
    )  # fmt: skip


def _shapes(batch: Array, K: Array) -> list[Work]:
    """Shapes of W that the runs can tell apart: linear only, unless there are three loads and five pairs."""
    if len(set(batch)) < 3 or len(set(zip(batch, K, strict=True))) < 5:
        return [Work()]
    tokens = batch * (K + 1)
    ridges = np.geomspace(tokens.min(), tokens.max(), _RIDGES + 2)[1:-1]
    return [*(Work(power) for power in _POWERS), *(Work(ridge=float(n)) for n in ridges)]


def _least_squares(
    batch: Array, K: Array, extra: Array, step: Array, work: Work
) -> tuple[dict[str, float], float, tuple[str, ...]]:
    """Non-negative least squares on errors relative to the step; coefficients, residual, and the terms used."""
    used = _identified(work, tuple(batch), tuple(K))
    columns = terms_of(work, batch, K)
    matrix = np.stack([columns[name] / step for name in used], axis=1)
    norms = np.linalg.norm(matrix, axis=0)
    solution, residual = nnls(matrix / norms, extra / step)
    coefficients = dict.fromkeys(_TERMS, 0.0) | dict(zip(used, map(float, solution / norms), strict=True))
    return coefficients, float(residual), used


@lru_cache(maxsize=1024)
def _identified(work: Work, batch: tuple[float, ...], K: tuple[float, ...]) -> tuple[str, ...]:
    """The terms that these pairs can tell apart."""
    columns = terms_of(work, batch, K)
    used: list[str] = []
    # With one draft length, what a first pass costs cannot be told from what every token costs.
    for term in _TERMS if len(set(K)) > 1 else _TERMS[:2]:
        matrix = np.stack([columns[name] for name in (*used, term)], axis=1)
        norms = np.linalg.norm(matrix, axis=0)
        if norms.all() and np.linalg.matrix_rank(matrix / norms, tol=1e-6) > len(used):
            used.append(term)
    return tuple(used)
