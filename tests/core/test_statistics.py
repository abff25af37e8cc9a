"""Known values by hand; coverage and the false-alarm rate by simulation."""

import numpy as np
import pytest

from drafthead.core import statistics
from drafthead.core.comparison import percentile, statistic_change, throughput_change
from drafthead.core.statistics import (
    acceptance_by_position,
    acceptance_length,
    acceptance_length_interval,
    acceptance_rate,
    length_difference,
    proportion_interval,
    ratio_interval,
    repeated_ngram_share,
)


def test_acceptance_is_a_ratio_of_sums():
    drafts, accepted = [10, 1], [10, 3]
    assert acceptance_length(drafts, accepted) == pytest.approx(1 + 13 / 11)  # the mean of ratios is 3.0
    assert acceptance_rate([30, 3], accepted) == pytest.approx(13 / 33)


def test_acceptance_by_position():
    # 10 drafts of three: position 0 kept 8 times, 1 kept 4 times, 2 kept once.
    result = acceptance_by_position([4, 6], [[3, 1, 0], [5, 3, 1]])
    np.testing.assert_allclose(result.unconditional, [0.8, 0.4, 0.1])
    np.testing.assert_allclose(result.conditional, [0.8, 0.5, 0.25])
    assert acceptance_length([10], [13]) == pytest.approx(1 + result.unconditional.sum())


def test_nothing_drafted_is_not_a_number():
    assert np.isnan(ratio_interval([0, 0], [0, 0]).value)
    assert np.isnan(length_difference([1], [1], [0], [0]).value)
    assert np.isnan(proportion_interval(0, 0).value)


def test_one_prompt_has_no_interval_and_equal_prompts_have_a_point():
    assert np.isnan(ratio_interval([3], [4]).low)
    assert ratio_interval([3, 3], [4, 4]) == statistics.Interval(0.75, 0.75, 0.75)


def test_wilson_interval_stays_inside_zero_and_one():
    share = proportion_interval(160, 160)
    assert share.value == 1
    assert share.low == pytest.approx(0.9766, abs=1e-3)
    assert share.high == 1


@pytest.mark.parametrize(("faster", "sign"), [(0.8, 1), (1.25, -1)])
def test_positive_is_better_for_times_and_for_throughput(faster, sign):
    rng = np.random.default_rng(0)
    baseline = rng.uniform(1, 2, 64)
    tokens = rng.integers(50, 150, 64)
    slower = statistic_change(baseline * faster, baseline, percentile(95))
    rate = throughput_change(tokens, baseline * faster, tokens, baseline)
    for change in (slower, rate):
        assert change.resolved
        assert change.interval.value == pytest.approx(1 / faster - 1)
        assert np.sign(change.interval.low) == np.sign(change.interval.high) == sign


def test_higher_is_better_when_said_so():
    change = statistic_change([20.0, 22.0, 21.0], [10.0, 11.0, 10.5], lower_is_better=False)
    assert change.interval.value == pytest.approx(1.0)


def test_repeated_ngrams():
    assert repeated_ngram_share(range(100)) == 0
    assert repeated_ngram_share([1, 2, 3]) == 0
    assert repeated_ngram_share([7] * 100) == pytest.approx(92 / 93)


def _simulated_prompts(rng: np.random.Generator, prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts differ in length and in how predictable they are, as real ones do."""
    drafts = rng.integers(10, 60, prompts)
    return drafts, rng.binomial(3 * drafts, rng.beta(4, 4, prompts))


def test_intervals_cover_at_their_nominal_rate(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    rng = np.random.default_rng(1)
    intervals = [acceptance_length_interval(*_simulated_prompts(rng, 60), seed=i) for i in range(400)]
    covered = np.mean([i.low <= 2.5 <= i.high for i in intervals])  # E[accepted] / E[drafts] = 3 · 0.5
    assert 0.915 <= covered <= 0.98


def test_a_null_comparison_is_unresolved_95_percent_of_the_time(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    rng = np.random.default_rng(2)
    resolved = []
    for i in range(400):
        tokens = rng.integers(40, 192, 48)
        latency = tokens * 0.005
        noisy = [latency * rng.lognormal(0, 0.1, 48) for _ in range(2)]
        resolved.append(throughput_change(tokens, noisy[0], tokens, noisy[1], seed=i).resolved)
    assert 0.02 <= np.mean(resolved) <= 0.09


@pytest.mark.parametrize(("size", "requests"), [(8, 48), (8, 200), (32, 200), (4, 200)])
def test_requests_that_wait_together_are_not_independent_evidence(monkeypatch, size, requests):
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    rng = np.random.default_rng(4)

    def wait() -> np.ndarray:
        shared = np.repeat(rng.lognormal(0, 0.15, -(-requests // size)), size)[:requests]
        return shared * rng.lognormal(0, 0.02, requests)

    for statistic in (np.median, percentile(95)):
        changes = [statistic_change(wait(), wait(), statistic, waves=size, seed=i) for i in range(40)]
        assert np.mean([c.resolved for c in changes]) <= 0.15
        assert all(np.isfinite(c.interval.value) for c in changes)
        assert all(np.isnan(c.interval.low) for c in changes) == (requests // size < 10)


def test_an_estimate_on_its_own_bound_has_no_interval():
    values = np.r_[np.full(40, 1.0), np.full(8, 3.0)]  # the first wave waited: every P95 is 3 or a little less
    change = statistic_change(values, np.linspace(0.99, 1.01, 48), percentile(95))
    assert np.isnan(change.interval.low)
    assert not change.resolved


@pytest.mark.parametrize("spread", [0.1, 0.4])
def test_p95_of_separate_requests_covers(monkeypatch, spread):
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    rng = np.random.default_rng(5)
    common = rng.lognormal(0, 0.3, 100)
    changes = [
        statistic_change(*(common * rng.lognormal(0, spread, 100) for _ in range(2)), percentile(95), seed=i)
        for i in range(120)
    ]
    assert np.mean([c.resolved for c in changes]) <= 0.09


def test_a_true_gain_of_five_percent_is_resolved(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    rng = np.random.default_rng(3)
    tokens = rng.integers(40, 192, 200)
    latency = tokens * 0.005
    resolved = []
    for i in range(50):
        head = latency / 1.05 * rng.lognormal(0, 0.15, 200)
        baseline = latency * rng.lognormal(0, 0.15, 200)
        resolved.append(throughput_change(tokens, head, tokens, baseline, seed=i).resolved)
    assert np.mean(resolved) >= 0.8
