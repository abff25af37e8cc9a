"""Two methods compared on the same prompts: relative changes, positive = better, with their intervals.

Prompts are resampled in pairs. What that cannot see is noise that neighbouring requests share, or that differs
between server starts: the first is looked for (see `statistic_change`), the second needs an ABBA design, whose blocks
widen the interval (see `across_blocks`).

P prompts, L loads, B blocks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy import stats

from drafthead.statistics import (
    CONFIDENCE,
    FEWEST_PROMPTS,
    RESAMPLES,
    Array,
    Change,
    TimeChange,
    resampled_bounds,
    stratified_draws,
)

_FEWEST_WAVES = 10


def throughput_change(
    tokens: ArrayLike, share_s: ArrayLike, other_tokens: ArrayLike, other_share_s: ArrayLike, weights: ArrayLike = 1.0
) -> Change:
    """Relative change of output tokens per second at equal requests in flight, at one load or over a mix of loads.

    By Little's law a level with C requests in flight delivers C · Σ tokens / Σ latency tokens per second, so the ratio
    of two methods at the same C is a ratio of sums over prompts. Over a mix it is how much less time the same tokens
    take: a baseline that spends the share w of its time at a load needs w / speedup there with the other method, so
    the whole takes Σ w / speedup as long, a weighted harmonic mean.

    Its logarithm is resampled by prompt, in pairs, over all loads at once, because a prompt that is slow at a load is
    slow at the others too; loads resampled apart would miss that. Prompts are drawn in strata, see `stratified_draws`.

    Args:
        tokens, share_s: (P,) or (L, P) of the treated method, output tokens and share of the wall time of every prompt
            at every load; 0 where a load did not send the prompt.
        other_tokens, other_share_s: of the baseline, the same prompts in the same order.
        weights: (L,) share of the baseline's time at each load.
    """
    arrays = [np.atleast_2d(np.asarray(a, float)) for a in (tokens, share_s, other_tokens, other_share_s)]
    share = np.asarray(weights, float) / np.sum(weights)

    def log_ratio(times_drawn: Array) -> Array:
        t, s, ot, os = (times_drawn @ a.T for a in arrays)  # (..., L)
        with np.errstate(invalid="ignore", divide="ignore"):
            return -np.log(np.sum(share * (ot / os) / (t / s), axis=-1))

    sent = arrays[3] > 0  # (L, P)
    value = float(log_ratio(np.ones(sent.shape[1])))
    if sent.sum(axis=1).min() < FEWEST_PROMPTS:
        return _as_change(value, np.nan, np.nan)
    drawn = log_ratio(stratified_draws(sent, RESAMPLES, np.random.default_rng(0)))
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return _as_change(value, low, high)


def across_blocks(change: Change, by_block: ArrayLike) -> Change:
    """The change with what server starts differ by in its interval, added in quadrature on the scale of logarithms.

    A block starts every server once, so blocks are what was repeated: their spread is Student's t with B - 1 degrees
    of freedom, times s / √B. Two blocks say little of their spread (t = 12.7, against 4.3 of three): only a gain far
    above what they differ by is resolved.

    Args:
        change: over all blocks, its interval by resampling prompts.
        by_block: (B,) the change in each block alone, as a fraction; one block leaves the change as it is.
    """
    blocks = np.size(by_block)
    if blocks < 2:
        return change
    spread = np.std(np.log1p(by_block), ddof=1) / np.sqrt(blocks)
    starts = stats.t.ppf((1 + CONFIDENCE) / 2, blocks - 1) * spread
    value, low, high = np.log1p([change.value, change.low, change.high])
    bounds = value - np.hypot(value - low, starts), value + np.hypot(high - value, starts)
    return _as_change(value, *bounds, type(change))


def sum_of_parts(changes: Sequence[Change], weights: ArrayLike) -> Change:
    """Change of a whole whose parts were measured one by one, so that their errors are independent.

    Args:
        changes: of throughput, of every part.
        weights: share of the baseline's time that each part takes.
    """
    value, low, high = np.log1p([(x.value, x.low, x.high) for x in changes]).T
    time = np.asarray(weights, float) / np.sum(weights) * np.exp(-value)
    share = time / time.sum()
    total = -np.log(time.sum())
    return _as_change(
        total, total - np.linalg.norm(share * (value - low)), total + np.linalg.norm(share * (high - value))
    )


def differ(one: Change, other: Change, least: float) -> bool:
    """Whether two independent estimates of a change differ by more than a factor of 1 + least and than chance allows.

    Never where one of them has no interval.
    """
    both = sorted(np.log1p([(x.value, x.low, x.high) for x in (one, other)]).tolist())
    (low, _, low_top), (high, high_bottom, _) = both
    return high - low > np.log1p(least) and high - low > np.hypot(low_top - low, high - high_bottom)


def statistic_change(
    values: ArrayLike, baseline: ArrayLike, statistic: Callable[..., Any] = np.mean, *, waves: int = 1
) -> Change:
    """Relative change of a statistic (mean, median, a percentile) of per-request times, paired by prompt.

    It is baseline / treated - 1, so that positive is better, and written as a time: 8 ms instead of 10 ms are 1.25
    times shorter.

    Args:
        values: (P,) or (P, B) of the treated method, positive, or 0 where there was nothing to time: a response in one
            chunk. The statistic is over requests, of all blocks; what is resampled are prompts.
        baseline: the same of the baseline, the same prompts in the same order.
        statistic: reduces an array along `axis`, such as `np.median`.
        waves: requests that are sent together and may share their wait. Where neighbours resemble each other, waves
            are resampled instead of requests, and with fewer than ten of them there is no interval.
    """
    arrays = [np.atleast_2d(np.asarray(times, float).T).T for times in (values, baseline)]  # (P, B)
    if not arrays[0].size:
        return TimeChange(np.nan, np.nan, np.nan)
    least = min(array[array > 0].min(initial=np.inf) for array in arrays)
    if waves < 2 or not _clumped(np.subtract(*(np.log(np.maximum(array, least)).mean(-1) for array in arrays)), waves):
        waves = 1
    members = np.arange(len(arrays[0]) // waves * waves).reshape(-1, waves)  # (W, waves) requests of each full wave

    def log_ratio(*arrays: Array) -> Array:
        return np.log(statistic(arrays[1], axis=-1)) - np.log(statistic(arrays[0], axis=-1))

    def of_waves(index: Array, axis: int = -1) -> Array:
        chosen = members[index.astype(int)]  # (..., W, waves)
        return log_ratio(*(array[chosen].reshape(*index.shape[:-1], -1) for array in arrays))

    value = float(log_ratio(*(array.ravel() for array in arrays)))
    if len(members) < (_FEWEST_WAVES if waves > 1 else FEWEST_PROMPTS):
        return _as_change(value, np.nan, np.nan, TimeChange)
    bounds = resampled_bounds((np.arange(len(members), dtype=float),), of_waves, "percentile")
    return _as_change(value, bounds.low, bounds.high, TimeChange)


def _as_change(value: float, low: float, high: float, kind: type[Change] = Change) -> Change:
    """Of the logarithm of a ratio and its bounds."""
    # An estimate on its own bound, as a percentile in a clump of equal values has it, gets no interval.
    if high - low > 1e-9 and min(value - low, high - value) <= 0.01 * (high - low):
        low = high = np.nan
    return kind(*(float(np.expm1(x)) for x in (value, low, high)))


def _clumped(log_ratios: Array, waves: int) -> bool:
    """Whether differences within a wave resemble each other more than chance allows (one-way analysis of variance).

    Requests that are sent together wait together. Resampled one by one they look like independent evidence: over
    waves of 8 with no difference at all, a P95 of 48 requests would be called resolved three times out of four.
    """
    groups = log_ratios[: len(log_ratios) // waves * waves].reshape(-1, waves)
    if len(groups) < 2:
        return True  # a single wave shows nothing of how waves differ
    with np.errstate(invalid="ignore", divide="ignore"):
        return bool(stats.f_oneway(*groups).pvalue < 1e-4)
