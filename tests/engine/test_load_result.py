"""The arithmetic of times: of one request, of how many were in flight, of whether a load was reached."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from drafthead.config.evaluation import LoadConfig
from drafthead.engine.load import EngineSample, LoadResult, RequestTimes, send_times


def _times(start: float, ttft: float, gaps: list[float], tokens: int) -> RequestTimes:
    return RequestTimes("p", "", 10, tokens, start, ttft, gaps, ttft + sum(gaps), "")


def test_times_of_a_request_follow_from_its_chunks():
    # Sent at 0; chunks at 1, 2 and 4 s carry 1, 3 and 3 tokens.
    metrics = _times(0, 1.0, [1.0, 2.0], 7).metrics
    assert (metrics["ttft_s"], metrics["e2e_s"]) == (1.0, 4.0)
    assert metrics["tpot_s"] == pytest.approx(3 / 6)
    assert metrics["itl_s"] == pytest.approx(1.5)
    assert metrics["tpot_all_s"] == pytest.approx(4 / 7)


def test_achieved_concurrency_is_how_many_were_in_flight():
    # Two at a time, each 1 s long:   0-1, 0-1, 1-2, 1-2, 2-3, 2-3
    steady = [_times(s, 0.5, [0.5], 2) for s in (0, 0, 1, 1, 2, 2)]
    assert LoadResult(steady, []).achieved == pytest.approx(2.0)
    at_once = [_times(0.0, 0.5, [0.5], 2) for _ in range(5)]  # 200 asked, five prompts: never more than five
    assert LoadResult(at_once, []).achieved == 5


def test_a_request_that_failed_is_in_no_figure_of_speed():
    good = [_times(start, 0.5, [0.5], 4) for start in (0, 1)]
    timed_out = RequestTimes("p", "TimeoutError", 0, 0, 1.0, 0.0, [], 60.0, "")
    summary = LoadResult([*good, timed_out], []).summary(LoadConfig(concurrency=1))
    assert (summary["failed"], summary["duration_s"], summary["output_tokens_per_s"]) == (1, 2, 4)


def _reached(load: LoadConfig, requests: list[RequestTimes], achieved: float, running: float, waiting: float) -> bool:
    """Of a result with these figures."""
    figures = {"achieved": achieved, "in_engine": (running, waiting)}
    good = [request for request in requests if not request.error]
    return LoadResult.reached(SimpleNamespace(requests=requests, good=good, **figures), load)


def _sent(*starts: float) -> list[RequestTimes]:
    return [RequestTimes("p", "", 10, 2, start, 0.5, [0.5], 1.0, "") for start in starts]


def test_a_load_is_reached_when_as_many_were_in_flight_or_sent_in_time():
    closed = LoadConfig(concurrency=8)
    assert _reached(closed, _sent(0, 1), 7.2, 8, 0)
    assert not _reached(closed, _sent(0, 1), 7.1, 8, 0)
    rate = LoadConfig(request_rate=2)
    last = float(send_times(rate, 4)[-1])
    assert _reached(rate, _sent(0, 0.5, 1, 1.1 * last), 1.0, 1, 0)
    assert not _reached(rate, _sent(0, 0.5, 1, 1.2 * last), 1.0, 1, 0)
    failed = RequestTimes("p", "TimeoutError", 0, 0, 0.0, 0.0, [], 60.0, "")
    assert _reached(rate, [failed, *_sent(0.5, 1, last)], 1.0, 1, 0)  # sent in time, whatever came of it
    capped = LoadConfig(request_rate=2, concurrency=4)  # the cap holds requests back: full is what was asked for
    assert _reached(capped, _sent(0, 1, 2, 9), 3.9, 4, 0)


def test_requests_are_due_at_the_rate_on_average():
    assert send_times(LoadConfig(concurrency=4), 3).tolist() == [0, 0, 0]
    for burstiness in (0.2, 1.0):
        due = send_times(LoadConfig(request_rate=2, burstiness=burstiness), 50)
        assert (due[-1], (due[1:] >= due[:-1]).all()) == (pytest.approx(25), True)
    assert np.diff(send_times(LoadConfig(request_rate=2, burstiness=1e6), 9)) == pytest.approx(0.5, rel=0.05)


def test_what_waits_in_the_engine_does_not_run():
    """Eight in flight on a server that runs two at a time."""
    requests = [_times(start, 0.5, [0.5], 2) for start in (0, 0, 0, 0, 1, 2, 3, 4)]
    samples = [EngineSample(0.0, 0, 0), *(EngineSample(at / 2, 2, 6) for at in range(1, 8)), EngineSample(4.5, 1, 0)]
    result = LoadResult(requests, samples)
    assert result.in_engine == (2, 6)
    eight, three = LoadConfig(concurrency=8), LoadConfig(concurrency=3)
    assert not _reached(eight, requests, 7.98, *result.in_engine)
    assert not _reached(three, requests, 2.99, 2, 1)
    assert not _reached(eight, requests, 7.98, 4, 0)  # on their way to the engine, and not in it
    assert _reached(eight, requests, 7.98, 7, 0)  # one has just been answered
    assert _reached(eight, requests, 7.98, math.nan, math.nan)  # a server that does not say
    wave = LoadResult(requests[:4], samples[:3])  # all at once: the most that ran
    assert wave.in_engine == (2, 6)
    assert math.isnan(LoadResult(requests, []).in_engine[0])
