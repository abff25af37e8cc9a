"""Two methods: known changes by hand; coverage, false alarms and power by simulation."""

import numpy as np
import pytest

from drafthead import statistics
from drafthead.evaluation import comparison
from drafthead.evaluation.comparison import across_blocks, differ, statistic_change, sum_of_parts, throughput_change
from drafthead.evaluation.results.levels import MEASURE
from drafthead.statistics import FEWEST_PROMPTS, Change, stratified_draws

P95 = MEASURE["e2e_p95"].statistic


@pytest.mark.parametrize("untimed", [0, 1])
@pytest.mark.parametrize("requests", [48, 200])
def test_requests_that_wait_together_are_not_independent_evidence(monkeypatch, requests, untimed):
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    rng, size = np.random.default_rng(4), 8

    def wait() -> np.ndarray:
        shared = np.repeat(rng.lognormal(0, 0.15, -(-requests // size)), size)[:requests]
        return shared * rng.lognormal(0, 0.02, requests) * (np.arange(requests) >= untimed)

    for statistic in (np.median, P95):
        changes = [statistic_change(wait(), wait(), statistic, waves=size) for _ in range(40)]
        assert np.mean([c.resolved for c in changes]) <= 0.15
        assert all(np.isfinite(c.value) for c in changes)
        assert all(np.isnan(c.low) for c in changes) == (requests // size < 10)


def test_an_estimate_on_its_own_bound_has_no_interval():
    values = np.r_[np.full(40, 1.0), np.full(8, 3.0)]  # the first wave waited: every P95 is 3 or a little less
    change = statistic_change(values, np.linspace(0.99, 1.01, 48), P95)
    assert np.isnan(change.low)
    assert not change.resolved


def test_p95_of_separate_requests_covers(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    rng = np.random.default_rng(5)
    common = rng.lognormal(0, 0.3, 100)
    changes = [statistic_change(*(common * rng.lognormal(0, 0.4, 100) for _ in range(2)), P95) for _ in range(120)]
    assert np.mean([c.resolved for c in changes]) <= 0.09


def _mix(rng: np.random.Generator, requests: tuple[int, ...], gain: float) -> list[np.ndarray]:
    """Tokens and times of head and baseline, (L, P): loads that send the first requests of one list of prompts."""
    tokens = rng.integers(40, 192, max(requests))
    sent = np.array([[i < n for i in range(len(tokens))] for n in requests])

    def seconds(speed: float) -> np.ndarray:
        pace = np.array([[0.005], [0.02]]) / speed
        return sent * tokens * pace * rng.lognormal(0, 0.15, sent.shape)

    return [sent * tokens, seconds(1 + gain), sent * tokens, seconds(1.0)]


def test_a_mix_of_loads_is_a_harmonic_mean_of_their_speedups():
    tokens, seconds = np.full((2, 4), 10.0), np.full((2, 4), 1.0)
    change = throughput_change(tokens, seconds / [[1.5], [1.2]], tokens, seconds, [0.25, 0.75])
    assert change.value == pytest.approx(1 / (0.25 / 1.5 + 0.75 / 1.2) - 1)


def test_the_interval_over_a_mix_covers_and_calls_nothing_a_gain(monkeypatch):
    monkeypatch.setattr(comparison, "RESAMPLES", 250)
    rng = np.random.default_rng(6)
    for gain, resolved in ((0.0, (0.01, 0.1)), (0.05, (0.8, 1.0))):
        changes = [throughput_change(*_mix(rng, (100, 160), gain), [0.5, 0.5]) for _ in range(100)]
        assert 0.90 <= np.mean([c.low <= gain <= c.high for c in changes]) <= 0.985
        assert resolved[0] <= np.mean([c.resolved for c in changes]) <= resolved[1]


def test_a_short_load_is_never_left_out_of_a_mix():
    sent = np.array([[i < n for i in range(200)] for n in (3, 200)])
    times = stratified_draws(sent, 500, np.random.default_rng(0))
    assert (times @ sent.T == [3, 200]).all()  # drawn over all prompts at once, 5 in 100 would miss the first load
    rng = np.random.default_rng(1)
    change = throughput_change(*_mix(rng, (FEWEST_PROMPTS, 400), 0.3), [0.5, 0.5])
    assert change.resolved


def test_too_few_prompts_have_no_interval():
    rng = np.random.default_rng(0)
    for prompts in (0, 1, 2, FEWEST_PROMPTS - 1):
        head, baseline = rng.uniform(1, 1.1, prompts), rng.uniform(2, 2.2, prompts)
        changes = [statistic_change(head, baseline, P95), throughput_change(head, head, head, baseline)]
        if prompts:
            changes += [throughput_change(*(np.tile(a, (2, 1)) for a in (head, head, head, baseline)), [1, 1])]
            assert all(c.value > 0.5 for c in changes)
        assert not any(c.resolved or np.isfinite(c.low) for c in changes)


def test_what_server_starts_differ_by_is_in_the_interval():
    change = Change(0.02, 0.01, 0.03)
    assert across_blocks(change, [0.02]) == change
    same = across_blocks(change, [0.02, 0.02])
    assert (same.value, same.low, same.high) == pytest.approx((0.02, 0.01, 0.03))
    assert not across_blocks(change, [0.045, -0.005]).resolved
    assert across_blocks(Change(0.2, 0.19, 0.21), [0.2, 0.21]).resolved
    assert not across_blocks(change, [0.02, np.nan]).resolved


def test_starts_that_differ_by_chance_are_no_gain():
    rng = np.random.default_rng(7)
    resolved = []
    for _ in range(2000):
        alone = rng.normal(0, 0.03, 2)
        value = alone.mean()
        prompts = Change(*np.expm1([value, value - 0.005, value + 0.005]))
        resolved.append((prompts.resolved, across_blocks(prompts, np.expm1(alone)).resolved))
    by_prompts, by_blocks = np.mean(resolved, axis=0)
    assert by_prompts > 0.6
    assert by_blocks <= 0.07


def test_parts_add_up_by_the_time_they_take():
    """Three quarters of the baseline's time twice as fast, the rest as fast as before: 1 / (3/8 + 1/4)."""
    parts = [Change(1.0, 0.9, 1.1), Change(0.0, -0.05, 0.05)]
    whole = sum_of_parts(parts, [3, 1])
    assert whole.value == pytest.approx(0.6)
    assert 0.5 < whole.low < 0.6 < whole.high < 0.7
    assert sum_of_parts(parts[:1], [3]).low == pytest.approx(0.9)


def test_estimates_differ_beyond_their_intervals_and_a_tolerance():
    whole = Change(0.238, 0.18, 0.30)
    assert differ(whole, Change(0.38, 0.33, 0.43), 0.05)
    assert differ(Change(0.38, 0.33, 0.43), whole, 0.05)
    assert not differ(whole, Change(0.38, 0.23, 0.53), 0.05)  # the whole may be what wide intervals allow
    assert not differ(Change(0.3, 0.299, 0.301), Change(0.33, 0.329, 0.331), 0.05)
    assert not differ(whole, Change(0.8, np.nan, np.nan), 0.05)
