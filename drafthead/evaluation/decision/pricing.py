"""Prices of every load and draft length, run or not: speed of decoding with its interval.

The interval of a predicted speedup holds two things, added in quadrature on the scale of logarithms: what resampling
prompts does to the fit, and the model's error on pairs that were left out of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drafthead.evaluation.decision.cost_model import CostModel, fit, refit
from drafthead.evaluation.decision.speed import SpeedSamples
from drafthead.statistics import CONFIDENCE, Array, Interval, stratified_draws

_RESAMPLES = 200  # of whole fits


@dataclass(frozen=True)
class Price:
    """A load and a draft length.

    Attributes:
        concurrency, K: which.
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
    low, high = _bounds(samples, model, [(min(c, max_batch), K) for c, K in pairs], seed)
    prices = []
    for (c, K), below, above in zip(pairs, low, high, strict=True):
        batch = min(c, max_batch)
        value = model.speedup(batch, K)
        interval = model.widened(Interval(value, min(value, below), max(value, above)))
        prices.append(Price(c, K, interval, model.step_ratio(batch, K), model.extrapolates(batch, K)))
    return Priced(model, tuple(prices), max_batch)


def _bounds(
    samples: SpeedSamples, model: CostModel, pairs: Sequence[tuple[float, int]], seed: int
) -> tuple[Array, Array]:
    """Bounds of the speedup at each pair, by bootstrap over prompts of the whole fit."""
    batches, K = ([pair[i] for pair in pairs] for i in (0, 1))
    lengths = np.log([model.curve.length(int(k)) for k in K])
    draws = stratified_draws(samples.tokens > 0, _RESAMPLES, np.random.default_rng(seed))
    logs = [lengths - np.log(refit(model, samples.points(drawn)).step_ratios(batches, K)) for drawn in draws]
    low, high = np.quantile(logs, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    return np.exp(low), np.exp(high)
