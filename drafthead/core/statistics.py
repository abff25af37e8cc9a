"""Acceptance figures and the intervals around them: plain arrays in, named results out, no IO.

The unit of resampling is the prompt, because tokens of one answer are not independent. Every figure is a
ratio of sums over prompts (never a mean of per-prompt ratios), and its interval comes from SciPy's
bootstrap. A comparison resamples the same prompts in both arms. What this gives up is the variation
between server restarts, which no resampling of one run can show: repeat the run for that.

P prompts, K draft positions.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 2000
_FEWEST_WAVES = 10
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate and its two-sided interval, in the unit of the estimate; NaN where nothing was observed."""

    value: float
    low: float
    high: float

    def __add__(self, offset: float) -> "Interval":
        return Interval(self.value + offset, self.low + offset, self.high + offset)

    def scaled(self, factor: float) -> "Interval":
        """Value and bounds times `factor`; a negative one swaps the bounds."""
        low, high = sorted((self.low * factor, self.high * factor))
        return Interval(self.value * factor, low, high)


@dataclass(frozen=True)
class Change:
    """A relative difference between two arms, as a fraction; positive is better.

    Attributes:
        interval: 0.05 says that the treated arm is 5 % better than the baseline.
        resolved: the interval leaves zero out; otherwise nothing can be said about the sign. The bounds are NaN where
            resampling prompts gives no interval at all.
    """

    interval: Interval
    resolved: bool


@dataclass(frozen=True)
class PositionAcceptance:
    """Acceptance by draft position, each (K,) and in [0, 1].

    Attributes:
        unconditional: share of drafts in which positions 0 to k were all accepted.
        conditional: the same among the drafts in which positions 0 to k-1 were accepted.
    """

    unconditional: Array
    conditional: Array


def acceptance_length(drafts: ArrayLike, accepted: ArrayLike) -> float:
    """Tokens gained per verified draft, bonus token included: 1 + Σ accepted / Σ drafts (vLLM's formula).

    Args:
        drafts: (P,) verification steps that had a draft.
        accepted: (P,) draft tokens accepted.
    """
    return 1.0 + float(_ratio(np.asarray(accepted, float), np.asarray(drafts, float)))


def acceptance_rate(proposed: ArrayLike, accepted: ArrayLike) -> float:
    """Share of the proposed draft tokens that were accepted: Σ accepted / Σ proposed."""
    return float(_ratio(np.asarray(accepted, float), np.asarray(proposed, float)))


def acceptance_by_position(drafts: ArrayLike, accepted_at: ArrayLike) -> PositionAcceptance:
    """Acceptance at each draft position.

    Args:
        drafts: (P,) verification steps that had a draft.
        accepted_at: (P, K) how often position k was accepted, which implies all positions before it.
    """
    counts = np.asarray(accepted_at, float).sum(axis=0)  # (K,)
    total = np.asarray(drafts, float).sum()
    reached = np.concatenate([[total], counts[:-1]])  # drafts that got as far as position k
    with np.errstate(invalid="ignore", divide="ignore"):
        return PositionAcceptance(counts / total, counts / reached)


def acceptance_length_interval(drafts: ArrayLike, accepted: ArrayLike, seed: int = 0) -> Interval:
    """`acceptance_length` with its interval by bootstrap over prompts."""
    return ratio_interval(accepted, drafts, seed) + 1.0


def ratio_interval(numerator: ArrayLike, denominator: ArrayLike, seed: int = 0) -> Interval:
    """Σ numerator / Σ denominator with its BCa interval (Efron 1987) by bootstrap over prompts.

    Args:
        numerator: (P,) one value per prompt.
        denominator: (P,) in the same order; NaN comes out when it sums to zero.
        seed: of the resampling.
    """
    top, bottom = np.asarray(numerator, float), np.asarray(denominator, float)
    if bottom.sum() == 0:
        return Interval(np.nan, np.nan, np.nan)
    return _bootstrap((top, bottom), _ratio, seed, "BCa")


def length_difference(
    drafts: ArrayLike, accepted: ArrayLike, other_drafts: ArrayLike, other_accepted: ArrayLike, seed: int = 0
) -> Interval:
    """Acceptance length minus that of another method on the same prompts, in tokens, paired by prompt."""
    arrays = tuple(np.asarray(a, float) for a in (accepted, drafts, other_accepted, other_drafts))
    if arrays[1].sum() == 0 or arrays[3].sum() == 0:
        return Interval(np.nan, np.nan, np.nan)

    def difference(a: Array, d: Array, oa: Array, od: Array, axis: int = -1) -> Array:
        return _ratio(a, d, axis) - _ratio(oa, od, axis)

    return _bootstrap(arrays, difference, seed, "percentile")


def proportion_interval(successes: int, total: int) -> Interval:
    """A share of independent trials with its Wilson score interval (Wilson 1927)."""
    if total == 0:
        return Interval(np.nan, np.nan, np.nan)
    bounds = stats.binomtest(successes, total).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(successes / total, bounds.low, bounds.high)


def throughput_change(
    tokens: ArrayLike,
    latency_s: ArrayLike,
    other_tokens: ArrayLike,
    other_latency_s: ArrayLike,
    seed: int = 0,
) -> Change:
    """Relative change of output tokens per second at equal requests in flight.

    By Little's law a level with C requests in flight delivers C · Σ tokens / Σ latency tokens per second,
    so the ratio of two arms at the same C is a ratio of sums over prompts; its logarithm is resampled by
    prompt, in pairs.

    Args:
        tokens, latency_s: (P,) of the treated arm.
        other_tokens, other_latency_s: (P,) of the baseline, the same prompts in the same order.
        seed: of the resampling.
    """
    arrays = tuple(np.asarray(a, float) for a in (tokens, latency_s, other_tokens, other_latency_s))

    def log_ratio(t: Array, s: Array, ot: Array, os: Array, axis: int = -1) -> Array:
        return np.log(_ratio(t, s, axis)) - np.log(_ratio(ot, os, axis))

    return _as_change(_bootstrap(arrays, log_ratio, seed, "percentile"), better=1)


def statistic_change(
    values: ArrayLike,
    baseline: ArrayLike,
    statistic: Callable[..., Any] = np.mean,
    *,
    lower_is_better: bool = True,
    waves: int = 1,
    seed: int = 0,
) -> Change:
    """Relative change of a statistic (mean, median, a percentile) of per-request values, paired by prompt.

    Args:
        values: (P,) of the treated arm, positive.
        baseline: (P,) of the baseline, the same prompts in the same order.
        statistic: reduces an array along `axis`, such as `np.median` or `percentile(95)`.
        lower_is_better: true of times; 8 ms instead of 10 ms then reads as +25 %, because the change is
            baseline / treated - 1.
        waves: requests that are sent together and may share their wait. Where neighbours resemble each other, waves
            are resampled instead of requests, and with fewer than ten of them there is no interval.
        seed: of the resampling.
    """
    arrays = (np.asarray(values, float), np.asarray(baseline, float))
    clumped = waves > 1 and any(_clumped(array, waves) for array in arrays)

    def log_ratio(v: Array, b: Array, axis: int = -1) -> Array:
        return np.log(statistic(v, axis=axis)) - np.log(statistic(b, axis=axis))

    better = -1 if lower_is_better else 1
    if not clumped:
        return _as_change(_bootstrap(arrays, log_ratio, seed, "percentile"), better)
    members = np.arange(len(arrays[0]) // waves * waves).reshape(-1, waves)  # (W, waves) requests of each full wave
    if len(members) < _FEWEST_WAVES:
        return _as_change(Interval(float(log_ratio(*arrays)), np.nan, np.nan), better)

    def of_waves(index: Array, axis: int = -1) -> Array:
        chosen = members[index.astype(int)].reshape(*index.shape[:-1], -1)
        return log_ratio(*(array[chosen] for array in arrays))

    bounds = _resample((np.arange(len(members)),), of_waves, seed, "percentile")
    return _as_change(Interval(float(log_ratio(*arrays)), float(bounds.low), float(bounds.high)), better)


def percentile(q: float) -> Callable[..., Any]:
    """The q-th percentile as a statistic for `statistic_change`."""
    return lambda values, axis=-1: np.percentile(values, q, axis=axis)


def geometric_mean(values: ArrayLike) -> float:
    """exp of the mean logarithm; the ratio of two geometric means is the geometric mean of the ratios."""
    return float(stats.gmean(np.asarray(values, float)))


def repeated_ngram_share(tokens: ArrayLike, n: int = 8) -> float:
    """Share of a text's n-grams that occurred before in it: 0 for fresh text, near 1 for a loop."""
    ids = np.asarray(tokens)
    if len(ids) <= n:
        return 0.0
    windows = np.lib.stride_tricks.sliding_window_view(ids, n)
    return 1.0 - len(np.unique(windows, axis=0)) / len(windows)


def _ratio(top: Array, bottom: Array, axis: int = -1) -> Array:
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.sum(top, axis=axis) / np.sum(bottom, axis=axis)


def _bootstrap(data: tuple[Array, ...], statistic: Callable[..., Array], seed: int, method: str) -> Interval:
    value = float(statistic(*data, axis=-1))
    # Identical prompts leave nothing to resample, and BCa divides by their spread.
    if len(data[0]) < 2 or all(np.ptp(array) == 0 for array in data):
        return Interval(value, value, value) if len(data[0]) > 1 else Interval(value, np.nan, np.nan)
    bounds = _resample(data, statistic, seed, method)
    if np.isnan(bounds.low) and method == "BCa":
        bounds = _resample(data, statistic, seed, "percentile")
    return Interval(value, float(bounds.low), float(bounds.high))


def _resample(data: tuple[Array, ...], statistic: Callable[..., Array], seed: int, method: str) -> Any:
    with np.errstate(invalid="ignore", divide="ignore"):
        return stats.bootstrap(
            data, statistic, paired=True, vectorized=True, n_resamples=RESAMPLES,
            confidence_level=CONFIDENCE, method=method, rng=np.random.default_rng(seed),
        ).confidence_interval  # fmt: skip


def _as_change(log_ratio: Interval, better: int) -> Change:
    """`better` is 1 where a larger treated value is better, -1 where a smaller one is."""
    oriented = log_ratio.scaled(better)
    if _one_sided(oriented):
        oriented = Interval(oriented.value, np.nan, np.nan)
    interval = Interval(*(float(np.expm1(x)) for x in (oriented.value, oriented.low, oriented.high)))
    return Change(interval, resolved=bool(interval.low > 0 or interval.high < 0))


def _one_sided(interval: Interval) -> bool:
    """Whether the estimate sits on its own bound, as a percentile in a clump of equal values does: no interval."""
    width = interval.high - interval.low
    return bool(width > 1e-9 and min(interval.value - interval.low, interval.high - interval.value) <= 0.01 * width)


def _clumped(values: Array, waves: int) -> bool:
    """Whether requests of one wave resemble each other more than chance allows (one-way analysis of variance).

    Requests that are sent together wait together. Resampled one by one they look like independent evidence: over
    waves of 8 with no difference at all, a P95 of 48 requests would be called resolved three times out of four.
    """
    groups = np.log(values[: len(values) // waves * waves]).reshape(-1, waves)
    if len(groups) < 2:
        return True  # a single wave shows nothing of how waves differ
    with np.errstate(invalid="ignore", divide="ignore"):
        return bool(stats.f_oneway(*groups).pvalue < 1e-3)
