"""The rule for loops on texts that can be counted by hand."""

import pytest

from drafthead.data.looping import loops, repeated_share


def test_the_share_of_8_grams_that_occurred_before_is_counted():
    assert repeated_share(range(100)) == 0
    assert repeated_share([1, 2, 3]) == 0
    assert repeated_share([]) == 0
    assert repeated_share([7] * 100) == pytest.approx(92 / 93)


def test_more_than_a_tenth_is_a_loop():
    # 41 tokens have 34 8-grams; repeating the last ten tokens adds ten, of which three occurred before.
    text = list(range(41))
    assert not loops(text)
    assert not loops([*text, *text[-10:]])
    assert loops([*text, *text[-20:]])
    assert loops([1, 2, 3] * 10)
    assert not loops([1, 1])
