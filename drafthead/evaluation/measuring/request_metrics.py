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
from drafthead.engine.load import LoadResult, RequestTimes, send_times
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


def load_reached(
    load: LoadConfig, requests: Sequence[RequestTimes], achieved: float, running: float, waiting: float
) -> bool:
    """Whether a level was the load it is named after.

    Places are reached when that many requests, less a tenth, were in flight without waiting in the engine's queue and
    as many ran in it, give or take one that is between two places. A rate is reached when sending took no more than a
    tenth longer than it should; with a cap as well, the level is reached when the cap was full instead.

    Args:
        load: as requested.
        requests: the successful ones.
        achieved: in flight, see `achieved_concurrency`.
        running, waiting: of them in the engine, see `in_engine`; NaN where the server does not say.
    """
    served = achieved if np.isnan(running) else min(achieved - waiting, running + 1)
    full = load.concurrency is not None and bool(served >= REACHED * load.concurrency)
    if load.request_rate is None or full or len(requests) < 2:
        return full
    return max(r.start_s for r in requests) * REACHED <= send_times(load, len(requests))[-1]


def in_engine(result: LoadResult) -> tuple[float, float]:
    """Requests that ran in the engine and that waited in its queue: medians while there were requests to send.

    A level whose requests are all sent at once has no such time: then the most that ran at a time. NaN without samples.
    """
    if not result.samples:
        return math.nan, math.nan
    sent = [r.start_s for r in result.requests]
    inside = [s for s in result.samples if min(sent) < s.at_s <= max(sent)]
    if not inside or all_at_once(sent, result.duration_s):
        return max((s.running, s.waiting) for s in result.samples)
    return float(np.median([s.running for s in inside])), float(np.median([s.waiting for s in inside]))


def achieved_concurrency(requests: Sequence[RequestTimes]) -> float:
    """Mean number of requests in flight while there were still requests to send, as the client saw it.

    Counted from the first sending to the last, because a level drains after that whatever the server does.
    Requests that are all sent at once never fill more than their own number of places.
    """
    sent = np.array([r.start_s for r in requests])
    ended = sent + np.array([r.latency_s for r in requests])
    first, last = sent.min(), sent.max()
    if all_at_once(sent, ended.max() - first):
        return float(len(requests))
    inside = np.minimum(ended, last) - sent
    return float(inside.sum() / (last - first))


def all_at_once(sent: Sequence[float] | Array, duration_s: float) -> bool:
    """Whether all were sent in one go: there is no time to average over."""
    return bool(np.ptp(sent) < 0.01 * duration_s)
