"""Whole requests at every load and draft length: the cost model's decoding with the wait for the first token added.

A request takes TTFT + (n - 1) · TPOT for n output tokens, and c of them in flight deliver c · n tokens in that time.
How much longer the head makes the wait is taken from the loads that were run, whatever their draft length, and
interpolated between them: it is the same prefill plus a pass of the drafter. Means over requests; what is given up is
their spread.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drafthead.evaluation.decision.pricing import Priced
from drafthead.evaluation.results.levels import Level
from drafthead.statistics import Array


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
