"""The learning rate of every step."""

import pytest

from drafthead.training.optimizer import rate_share


def test_the_rate_warms_up_and_falls_to_a_tenth():
    shares = [rate_share(0.1, step, 100) for step in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert shares[9] == shares[10] == 1.0
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[99] == pytest.approx(0.1, abs=1e-3)
