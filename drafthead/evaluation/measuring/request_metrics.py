"""Latency figures by their written formula, from the raw times of one request.

Tools name the same thing differently, so each formula is stated once and printed in the report:

    ttft     first token - sent                     any channel; a reasoning model thinks first
    ttfot    first token of the final channel - sent    equals ttft without reasoning
    e2e      last token - sent
    tpot     (last - first) / (n - 1)               vLLM's TPOT, GuideLLM's ITL
    itl      gap between chunks, averaged           vLLM's ITL: one gap is one verification step
    tpot_all (last - sent) / n                      GuideLLM's TPOT: the first token's wait included

n output tokens. A speculative step delivers several tokens in one chunk, so `itl` gets worse by design where
`tpot` gets better: only `tpot` tells how fast text appears.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from drafthead.config.evaluation import LoadConfig
from drafthead.engine.load import RequestTimes
from drafthead.statistics import Array

REACHED = 0.9  # of what was requested: below it the level is labelled, not compared

FORMULAS = {
    "ttft_s": "first token − sent, any channel",
    "ttfot_s": "first token of Harmony's final channel − sent",
    "e2e_s": "last token − sent",
    "tpot_s": "(last − first) / (n − 1); vLLM's TPOT, GuideLLM's ITL",
    "itl_s": "mean gap between chunks; vLLM's ITL, one gap is one verification step",
    "tpot_all_s": "(last − sent) / n; GuideLLM's TPOT, includes the wait for the first token",
}


@dataclass(frozen=True)
class RequestMetrics:
    """Seconds; NaN where an output of one token defines no gap."""

    ttft_s: float
    e2e_s: float
    tpot_s: float
    itl_s: float
    tpot_all_s: float


def request_metrics(times: RequestTimes) -> RequestMetrics:
    """The figures of one successful request."""
    n = times.output_tokens
    return RequestMetrics(
        ttft_s=times.ttft_s,
        e2e_s=times.latency_s,
        tpot_s=(times.latency_s - times.ttft_s) / (n - 1) if n > 1 else math.nan,
        itl_s=float(np.mean(times.gaps_s)) if times.gaps_s else math.nan,
        tpot_all_s=times.latency_s / n if n else math.nan,
    )


def load_reached(load: LoadConfig, requests: Sequence[RequestTimes], achieved: float) -> bool:
    """Whether a level was the load it is named after.

    Places are reached when they were nine tenths full on average. A rate is reached when sending all requests took
    no more than a tenth longer than it should, and than chance alone explains; with a cap as well, the level is
    reached when the cap was full instead.

    Args:
        load: as requested.
        requests: the successful ones.
        achieved: `achieved_concurrency` of them.
    """
    full = load.concurrency is not None and achieved >= REACHED * load.concurrency
    if load.request_rate is None or full or len(requests) < 2:
        return full
    sent = [r.start_s for r in requests]
    drawn = sending_time(load, len(requests)) + 2 * sending_spread(load, len(requests))
    return (max(sent) - min(sent)) * REACHED <= drawn


def sending_time(load: LoadConfig, count: int) -> float:
    """Seconds in which `count` requests should be sent: Σ 1 / rate, the rate of a ramp growing from request to request.

    Of n requests, a linear ramp sends request i at start + (end − start)·i/(n − 1) per second, an exponential one at
    start·(end/start)^(i/(n − 1)).
    """
    return float(np.sum(1 / _rates(load, count)))


def sending_spread(load: LoadConfig, count: int) -> float:
    """Standard deviation of that time, in seconds: √(Σ 1 / (rate² · burstiness)) over a ramp's gamma-distributed gaps.

    None without a ramp: there the client scales its gaps until they add up.
    """
    return float(np.sqrt(np.sum(_rates(load, count) ** -2) / load.burstiness)) if load.ramp else 0.0


def _rates(load: LoadConfig, count: int) -> Array:
    """Requests per second at which each of `count` requests is sent, (count,)."""
    end = load.request_rate or math.inf
    done = np.arange(count) / max(count - 1, 1)
    if load.ramp == "linear":
        return load.ramp_start + (end - load.ramp_start) * done
    if load.ramp == "exponential":
        return load.ramp_start * (end / load.ramp_start) ** done
    return np.full(count, end)


def achieved_concurrency(requests: Sequence[RequestTimes]) -> float:
    """Mean number of requests in flight while there were still requests to send.

    Counted from the first sending to the last, because a level drains after that whatever the server does.
    Requests that are all sent at once never fill more than their own number of places.
    """
    sent = np.array([r.start_s for r in requests])
    ended = sent + np.array([r.latency_s for r in requests])
    first, last = sent.min(), sent.max()
    # Sent in one go: the window has no length to average over.
    if last - first < 0.01 * (ended.max() - first):
        return float(len(requests))
    inside = np.minimum(ended, last) - sent
    return float(inside.sum() / (last - first))
