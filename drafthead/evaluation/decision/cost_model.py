"""The model that prices any draft length at any load: speedup(b, K) = AL(K) / r(b, K).

AL(K) is the acceptance length, which hardly depends on the load, and r(b, K) the time of a speculative step over
that of a plain step with the same b requests in the batch. Measured once each, they price every pair, run or not.
Decode only: the wait for the first token is not in it.

A speculative step costs what a plain one does, the drafter's passes, and K more tokens per request to verify:

    s(b, K) = base(b) + d0 + d1 · b + K · g + v · (W(b (K + 1)) - W(b)),    all coefficients >= 0

base(b) is interpolated between measured loads. W(n) is the target's work on n tokens, up to a factor: flat until
arithmetic outlasts the reading of weights and then linear (a ridge at n0 tokens), or a power of n below 1 where more
tokens share experts. The runs choose the shape. What this gives up is everything finer; what that costs is seen by
leaving one load after the other out of the fit, baseline included, and predicting it. A price's interval holds that
error and what resampling prompts does to the fit, added in quadrature on the scale of logarithms.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike
from scipy.interpolate import make_interp_spline
from scipy.optimize import nnls

from drafthead.evaluation.decision.speed import AcceptanceCurve, SpeedPoint, SpeedSamples
from drafthead.statistics import CONFIDENCE, Array, Interval, stratified_draws


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
    """Decoding speed at a load, predicted from the other loads alone; tokens per second of one request.

    Attributes:
        batch, K: which; K is None for the baseline.
        measured, predicted: speed.
        inside: the load lies between others; beyond them it is an extrapolation.
    """

    batch: float
    K: int | None
    measured: float
    predicted: float
    inside: bool

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
        held_out: the baseline and every draft length at every load that could be left out.
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

    def tokens_per_s(self, batch: float, K: int | None) -> float:
        """Of one request while decoding; K is None without a drafter."""
        return (1.0 if K is None else self.speedup(batch, K)) / self.base_step_s(batch)

    def best_draft(self, batch: float) -> int:
        """The draft length that decodes fastest, of all whose acceptance is known; 0 where none pays.

        With a schedule K = 0 still pays for the drafter's first pass, so it is compared as such.
        """
        return max({0, *self.curve.known}, key=lambda K: (self.speedup(batch, K), -K))

    def pays_up_to(self, K: int, largest: int) -> int:
        """The most requests in the batch, up to `largest`, for which drafting K tokens pays; 0 when it never does."""
        return max((b for b in range(1, largest + 1) if self.speedup(b, K) > 1), default=0)

    def extrapolates(self, batch: float, K: int) -> bool:
        """Whether the pair lies outside what was run."""
        return not (self.batches[0] <= batch <= self.batches[1] and min(self.lengths) <= K <= max(self.lengths))

    @property
    def error(self) -> float | None:
        """Root mean square of log(predicted / measured), of drafts at loads between others; None: no such."""
        logs = [np.log(h.predicted / h.measured) for h in self.held_out if h.inside and h.K is not None]
        return float(np.sqrt(np.mean(np.square(logs)))) if logs else None

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


# Fitting the model to runs, and to resamplings of their prompts.


_POWERS = (1.0, 0.75, 0.5)
_RIDGES = 12
# A term joins when it adds rank, in this order.
_TERMS = ("g", "v", "d0", "d1")


def fit(points: Sequence[SpeedPoint], positions: Sequence[float] = ()) -> CostModel:
    """Fit the model, and predict every load by a fit without it.

    Args:
        points: plain steps (K None) and drafted ones; several of one (batch, K) are averaged by the fit.
        positions: joint prefix acceptance at the largest K, for draft lengths that were not run.

    Raises:
        ValueError: there is no plain or no drafted step.
    """
    baseline, drafted = _split(points)
    found = [h for batch in sorted({p.batch for p in baseline}) for h in _leave_out(points, batch, tuple(positions))]
    return replace(_fit(baseline, drafted, tuple(positions)), held_out=tuple(found))


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


def _leave_out(points: Sequence[SpeedPoint], batch: float, positions: tuple[float, ...]) -> Iterator[HeldOut]:
    """The baseline and every draft length at a load; nothing where fewer than two other loads are left."""
    others = [p for p in points if p.batch != batch]
    loads = {p.batch for p in others if p.K is None} & {p.batch for p in others if p.K is not None}
    if len(loads) < 2:
        return
    model = _fit(*_split(others), positions)
    inside = min(loads) < batch < max(loads)
    for K in sorted({p.K for p in points if p.batch == batch}, key=lambda K: -1 if K is None else K):
        if K is None or K == 0 or K in model.curve.known:
            measured = 1 / float(np.mean([p.tpot_s for p in points if (p.batch, p.K) == (batch, K)]))
            yield HeldOut(batch, K, measured, model.tokens_per_s(batch, K), inside)


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


# Prices of every load and draft length, run or not.

_RESAMPLES = 200  # of whole fits


@dataclass(frozen=True)
class Price:
    """A load and a draft length.

    Attributes:
        speedup: of decoding, relative to no speculation.
        ratio: r, which is also the break-even acceptance length.
        extrapolated: outside what was run.
    """

    concurrency: int
    K: int
    speedup: Interval
    ratio: float
    extrapolated: bool


@dataclass(frozen=True)
class Priced:
    """The cost model of a method and its prices at every (concurrency, K) asked for."""

    model: CostModel
    prices: tuple[Price, ...]
    max_batch: int

    def at(self, concurrency: int, K: int) -> Price:
        """The price of a pair."""
        return next(p for p in self.prices if (p.concurrency, p.K) == (concurrency, K))

    def text(self, concurrency: int, K: int) -> str:
        """What the model says of a load that was not run; empty where it says nothing."""
        if K not in self.model.curve.known or concurrency not in {p.concurrency for p in self.prices}:
            return ""
        found = self.at(concurrency, K)
        i, where = found.speedup, ", outside what was run" if found.extrapolated else ""
        return f"; the cost model says {i.value - 1:+.1%} [{i.low - 1:+.1%}, {i.high - 1:+.1%}] decoding{where}"


def price(samples: SpeedSamples, concurrency: Sequence[int], max_batch: int, seed: int = 0) -> Priced:
    """Fit the cost model and price every load at every draft length whose acceptance is known.

    Args:
        samples: decoding times by prompt.
        concurrency: loads to price, run or not.
        max_batch: the engine's max_num_seqs; a load above it decodes as that batch.
        seed: of the resampling.

    Raises:
        ValueError: there are no runs without or none with drafts.
    """
    model = fit(samples.points(), samples.positions)
    pairs = [(c, K) for c in concurrency for K in model.curve.known]
    batches, lengths = [min(c, max_batch) for c, _ in pairs], np.log([model.curve.length(K) for _, K in pairs])
    draws = stratified_draws(samples.tokens > 0, _RESAMPLES, np.random.default_rng(seed))
    fits = [refit(model, samples.points(drawn)) for drawn in draws]
    logs = [lengths - np.log(one.step_ratios(batches, [K for _, K in pairs])) for one in fits]
    bounds = np.exp(np.quantile(logs, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0))
    prices = []
    for (c, K), batch, low, high in zip(pairs, batches, *bounds, strict=True):
        value = model.speedup(batch, K)
        interval = model.widened(Interval(value, min(value, low), max(value, high)))
        prices.append(Price(c, K, interval, model.step_ratio(batch, K), model.extrapolates(batch, K)))
    return Priced(model, tuple(prices), max_batch)
