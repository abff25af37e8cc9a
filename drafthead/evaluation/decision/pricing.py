"""Prices of every load and draft length, run or not: speed with its interval, whole requests, tokens and money.

The interval of a predicted speedup holds two things, added in quadrature on the scale of logarithms: what resampling
prompts does to the fit, and the model's error on pairs that were left out of it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drafthead.evaluation.decision.cost_model import CostModel, fit, refit
from drafthead.evaluation.decision.speed import SpeedSamples
from drafthead.evaluation.results.levels import Level
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


# Whole requests at every load and draft length: the cost model's decoding with the wait for the first token added.
#
# A request takes TTFT + (n - 1) · TPOT for n output tokens, and c of them in flight deliver c · n tokens in that time.
# How much longer the head makes the wait is taken from the loads that were run, whatever their draft length, and
# interpolated between them: it is the same prefill plus a pass of the drafter. Means over requests; what is given up is
# their spread.


@dataclass(frozen=True)
class RequestPrice:
    """A load and a draft length.

    Attributes:
        concurrency, K: which; K 0 is the baseline.
        tokens_per_s: output tokens per second.
        change: of it against the baseline, as a fraction.
        extrapolated: outside what was run.
    """

    concurrency: int
    K: int
    tokens_per_s: float
    change: float
    extrapolated: bool


def request_prices(priced: Priced, levels: Sequence[Level]) -> list[RequestPrice]:
    """Every pair of `priced` that fits the engine's batch, and the baseline at each of its loads.

    Args:
        priced: of a method.
        levels: of that method on the same workload.
    """
    by_load: dict[int, list[Level]] = {}
    for level in levels:
        by_load.setdefault(level.concurrency, []).append(level)
    loads = sorted(by_load)
    wait = np.array([_mean(by_load[c], "ttft_s_base") for c in loads])
    longer = np.array([_mean(by_load[c], "ttft_s_head") for c in loads]) / wait
    tokens = float(np.mean([level.tokens_per_request for level in levels]))
    found = []
    for c in sorted({p.concurrency for p in priced.prices if p.concurrency <= priced.max_batch}):
        ttft, ratio = np.interp(c, loads, wait), np.interp(c, loads, longer)
        decode = (tokens - 1) * priced.model.base_step_s(c)
        plain = float(ttft + decode)
        known = loads[0] <= c <= loads[-1]
        found.append(RequestPrice(c, 0, c * tokens / plain, 0.0, not known))
        for K in priced.model.curve.known:
            price = priced.at(c, K)
            seconds = float(ttft * ratio + decode / price.speedup.value)
            found.append(RequestPrice(c, K, c * tokens / seconds, plain / seconds - 1, price.extrapolated or not known))
    return found


def _mean(levels: Sequence[Level], column: str) -> float:
    values: Array = np.concatenate([level.paired[column].to_numpy(float) for level in levels])
    return float(values.mean())
