"""The arithmetic of times: of one request, of how many were in flight, of whether a load was reached."""

import pytest

from drafthead.config.evaluation import LoadConfig
from drafthead.engine.load import RequestTimes
from drafthead.evaluation.measuring.request_metrics import (
    achieved_concurrency,
    load_reached,
    request_metrics,
    sending_spread,
    sending_time,
)


def _times(start: float, ttft: float, gaps: list[float], tokens: int) -> RequestTimes:
    return RequestTimes("p", "", 10, tokens, start, ttft, gaps, ttft + sum(gaps), "")


def test_times_of_a_request_follow_from_its_chunks():
    # Sent at 0; chunks at 1, 2 and 4 s carry 1, 3 and 3 tokens.
    metrics = request_metrics(_times(0, 1.0, [1.0, 2.0], 7))
    assert (metrics.ttft_s, metrics.e2e_s) == (1.0, 4.0)
    assert metrics.tpot_s == pytest.approx(3 / 6)
    assert metrics.itl_s == pytest.approx(1.5)
    assert metrics.tpot_all_s == pytest.approx(4 / 7)


def test_achieved_concurrency_is_how_many_were_in_flight():
    # Two at a time, each 1 s long:   0-1, 0-1, 1-2, 1-2, 2-3, 2-3
    steady = [_times(s, 0.5, [0.5], 2) for s in (0, 0, 1, 1, 2, 2)]
    assert achieved_concurrency(steady) == pytest.approx(2.0)
    at_once = [_times(0.0, 0.5, [0.5], 2) for _ in range(5)]  # 200 asked, five prompts: never more than five
    assert achieved_concurrency(at_once) == 5


def _sent(*starts: float) -> list[RequestTimes]:
    return [RequestTimes("p", "", 10, 2, start, 0.5, [0.5], 1.0, "") for start in starts]


def test_a_load_is_reached_when_as_many_were_in_flight_or_sent_in_time():
    closed = LoadConfig(concurrency=8)
    assert load_reached(closed, _sent(0, 1), 7.2)
    assert not load_reached(closed, _sent(0, 1), 7.1)
    rate = LoadConfig(request_rate=2)  # four requests in two seconds
    assert load_reached(rate, _sent(0, 0.5, 1, 2.2), 1.0)
    assert not load_reached(rate, _sent(0, 0.5, 1, 2.3), 1.0)
    capped = LoadConfig(request_rate=2, concurrency=4)  # the cap holds requests back: full is what was asked for
    assert load_reached(capped, _sent(0, 1, 2, 9), 3.9)
    ramp = LoadConfig(request_rate=4, ramp="exponential", ramp_start=1)
    assert sending_time(ramp, 3) == pytest.approx(1 + 1 / 2 + 1 / 4)
    assert sending_spread(ramp, 3) == pytest.approx((1 + 1 / 4 + 1 / 16) ** 0.5)
    assert sending_spread(ramp.model_copy(update={"burstiness": 4.0}), 3) == sending_spread(ramp, 3) / 2
    assert sending_spread(rate, 3) == 0.0
    # 1.75 s ± 1.15 s: as chance may draw it, and later than that
    assert load_reached(ramp, _sent(0, 3, 4.4), 1.0)
    assert not load_reached(ramp, _sent(0, 3, 4.6), 1.0)
    assert sending_time(ramp.model_copy(update={"ramp": "linear"}), 3) == pytest.approx(1 + 1 / 2.5 + 1 / 4)
