"""Rows wait under the name of their answer; the token that nobody fed has a row of zeros."""

import pytest
import torch

from drafthead.engine.capture.kept_rows import KeptRows


def test_rows_of_all_steps_come_in_order_with_a_zero_for_the_last_token():
    kept = KeptRows()
    rows = torch.randn(5, 2, 4)
    kept.add("a", 0, torch.randn(3, 2, 4))  # an earlier request of that name
    kept.add("a", 0, rows[:3])
    kept.add("b", 0, rows)
    kept.add("a", 3, rows[3:4])
    kept.add("a", 4, rows[4:])
    taken = kept.take("a", 6)
    torch.testing.assert_close(taken[:5], rows, rtol=0, atol=0)
    assert not taken[5].any()
    torch.testing.assert_close(kept.take("b", 5), rows, rtol=0, atol=0)


def test_missing_and_surplus_rows_are_errors():
    kept = KeptRows()
    for rows, tokens in ((3, 5), (3, 2)):
        kept.add("a", 0, torch.randn(rows, 2, 4))
        with pytest.raises(ValueError, match=f"a: states of {rows} tokens were captured while a text of {tokens}"):
            kept.take("a", tokens)
    with pytest.raises(ValueError, match="a: states of 0 tokens"):
        kept.take("a", 1)
    kept.add("a", 0, torch.randn(3, 2, 4))
    kept.clear()
    with pytest.raises(ValueError, match="a: states of 0 tokens"):
        kept.take("a", 3)
