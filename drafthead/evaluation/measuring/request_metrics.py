"""Latency figures by their written formula, from the raw times of one request.

Tools name the same thing differently, so each formula is stated once, in columns.FORMULAS, and printed in the report.
A speculative step delivers several tokens in one chunk, so `itl` gets worse by design where
`tpot` gets better: only `tpot` tells how fast text appears.
"""

import math
from collections.abc import Sequence

import numpy as np

from drafthead.config.evaluation import LoadConfig
from drafthead.engine.load import LoadResult, RequestTimes, send_times
from drafthead.statistics import Array

REACHED = 0.9  # of what was requested: below it the level is labelled, not compared


def request_metrics(times: RequestTimes) -> dict[str, float]:
    """The figures of one request by column, in seconds; NaN where an output of one token defines no gap."""
    n = times.output_tokens
    return {
        "ttft_s": times.ttft_s,
        "e2e_s": times.latency_s,
        "tpot_s": (times.latency_s - times.ttft_s) / (n - 1) if n > 1 else math.nan,
        "itl_s": float(np.mean(times.gaps_s)) if times.gaps_s else math.nan,
        "tpot_all_s": times.latency_s / n if n else math.nan,
    }


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
