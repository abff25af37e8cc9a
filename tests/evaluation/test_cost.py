"""What tokens cost."""

import pytest

from drafthead.evaluation.decision.cost import cost_per_million


def test_cost_takes_the_price_per_gpu():
    assert cost_per_million(3.6, 1, 1000.0) == pytest.approx(1.0)  # 3.6 per hour at 3.6 M tokens per hour
    assert cost_per_million(3.6, 2, 1000.0) == pytest.approx(2.0)
