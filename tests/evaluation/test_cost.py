"""What tokens cost, and when a cheaper token has paid for itself."""

import numpy as np
import pytest

from drafthead.evaluation.decision.cost import cost_per_million, payback


def test_cost_takes_the_price_per_gpu():
    assert cost_per_million(3.6, 1, 1000.0) == pytest.approx(1.0)  # 3.6 per hour at 3.6 M tokens per hour
    assert cost_per_million(3.6, 2, 1000.0) == pytest.approx(2.0)


def test_payback_takes_as_many_days_as_the_saving_needs():
    # 2 saved per million tokens, 10 million tokens a day: 20 a day.
    assert payback(100, 10e6, 5.0, 3.0).days == pytest.approx(5)
    assert payback(100, 10e6, 3.0, 3.5).days == np.inf
