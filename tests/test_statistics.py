"""Known values by hand; coverage by simulation."""

import numpy as np
import pytest

from drafthead import statistics
from drafthead.statistics import (
    Change,
    TimeChange,
    acceptance_by_position,
    acceptance_length,
    acceptance_length_interval,
    length_change,
    length_difference,
    proportion_interval,
    ratio_interval,
)


def test_acceptance_is_a_ratio_of_sums():
    drafts, accepted = [10, 1], [10, 3]
    assert acceptance_length(drafts, accepted) == pytest.approx(1 + 13 / 11)  # the mean of ratios is 3.0


def test_acceptance_by_position_is_unconditional_and_conditional():
    # 10 drafts of three: position 0 kept 8 times, 1 kept 4 times, 2 kept once.
    unconditional, conditional = acceptance_by_position([4, 6], [[3, 1, 0], [5, 3, 1]])
    np.testing.assert_allclose(unconditional, [0.8, 0.4, 0.1])
    np.testing.assert_allclose(conditional, [0.8, 0.5, 0.25])
    assert acceptance_length([10], [13]) == pytest.approx(1 + unconditional.sum())


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


def _simulated_prompts(rng: np.random.Generator, prompts: int) -> tuple[np.ndarray, np.ndarray]:
    """Prompts differ in length and in how predictable they are, as real ones do."""
    drafts = rng.integers(10, 60, prompts)
    return drafts, rng.binomial(3 * drafts, rng.beta(4, 4, prompts))


def test_intervals_cover_at_their_nominal_rate(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    rng = np.random.default_rng(1)
    intervals = [acceptance_length_interval(*_simulated_prompts(rng, 60)) for _ in range(400)]
    covered = np.mean([i.low <= 2.5 <= i.high for i in intervals])  # E[accepted] / E[drafts] = 3 · 0.5
    assert 0.915 <= covered <= 0.98


def test_change_of_a_head_covers_at_its_nominal_rate_and_widens_with_its_seeds(monkeypatch):
    monkeypatch.setattr(statistics, "RESAMPLES", 400)
    rng, covered = np.random.default_rng(2), 0
    for _ in range(300):  # the other head accepts a tenth less of the same prompts: 2.5 against 2.35
        drafts, share = rng.integers(10, 60, (60, 1)), rng.beta(4, 4, (60, 1))
        ours, theirs = (rng.binomial(3 * drafts, share * factor) for factor in (1, 0.9))
        change = length_change((drafts, ours), (drafts, theirs))
        covered += change.low <= 2.5 / 2.35 - 1 <= change.high
    assert 0.9 <= covered / 300 <= 0.98

    def width(spread: int) -> float:
        seeds = 2 * drafts + spread * np.array([-1, 0, 1])  # (60, 3), equal in the mean
        change = length_change((drafts.repeat(3, 1), seeds), (drafts, 2 * drafts))
        assert change.value == pytest.approx(0)
        return change.high - change.low

    assert width(0) == pytest.approx(0)
    assert 0 < width(2) < width(10)


@pytest.mark.parametrize(
    ("change", "text", "loss"),
    [
        (Change(0.36, 0.272, 0.457), "+36.0 % [+27.2, +45.7]", -0.36),
        (Change(-0.2, -0.3, 0.1), "-20.0 % [-30.0, +10.0], unresolved", 0.2),
        (Change(0.36, np.nan, np.nan), "+36.0 %, no interval", -0.36),
        (Change(np.nan, np.nan, np.nan), "–", np.nan),
        # 35.7 ms became 83.0
        (TimeChange(-0.57, -0.64, -0.413), "2.3 times longer [1.7, 2.8]", 83.0 / 35.7 - 1),
        (TimeChange(0.6, 0.5, 0.7), "1.60 times shorter [1.50, 1.70]", 1 / 1.6 - 1),
        (TimeChange(-0.04, -0.1, 0.1), "1.04 times longer [0.91, 1.11], unresolved", 1 / 0.96 - 1),
        (TimeChange(0.001, -0.1, 0.1), "as long [0.90, 1.10], unresolved", 1 / 1.001 - 1),
        (TimeChange(1.0, np.nan, np.nan), "2.0 times shorter, no interval", -0.5),
        (TimeChange(np.inf, np.nan, np.nan), "–", -1.0),
        (TimeChange(-1.0, np.nan, np.nan), "–", np.inf),
    ],
)
def test_a_change_reads_as_what_it_is(change, text, loss):
    assert change.text() == text
    assert change.loss == pytest.approx(loss, abs=2e-3, nan_ok=True)
    assert text.startswith(change.amount())
