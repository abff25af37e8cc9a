"""Windows: nothing longer than the budget, no loss row lost or counted twice."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafthead.drafters.eagle3.alignment import valid_positions
from drafthead.data.windows import cut, whole


def test_a_short_document_is_one_window():
    mask = torch.tensor([0, 0, 0, 1, 1])
    (window,) = cut(7, mask, budget=8, num_steps=2)
    assert window == whole(7, mask, 2)
    assert (window.document, window.start, window.stop, window.first_row, window.end_row) == (7, 0, 5, 1, 5)
    assert window.valid == (2, 1)


def test_the_example_of_the_docstring():
    mask = (torch.arange(12) >= 6).long()
    spans = [(w.start, w.stop, w.first_row, w.end_row) for w in cut(0, mask, budget=8, num_steps=1)]
    assert spans == [(1, 9, 4, 7), (4, 12, 7, 10)]


@given(
    st.lists(st.booleans(), min_size=1, max_size=120),
    st.integers(10, 40),
    st.integers(1, 7),
)
def test_every_valid_position_is_in_exactly_one_window(bits, budget, num_steps):
    mask = torch.tensor(bits)
    windows = cut(0, mask, budget, num_steps)
    seen = torch.zeros(num_steps, len(mask), dtype=torch.long)
    for window in windows:
        assert window.num_tokens <= budget
        assert window.start <= window.first_row < window.end_row <= window.stop
        # What the window itself can see is what it counts.
        inside = valid_positions(mask[window.start : window.stop], torch.tensor([0, window.num_tokens]), num_steps)
        rows = slice(window.first_row - window.start, window.end_row - window.start)
        assert tuple(inside[:, rows].sum(1).tolist()) == window.valid
        seen[:, window.first_row : window.end_row] += inside[:, rows].long()
    wanted = valid_positions(mask, torch.tensor([0, len(mask)]), num_steps).long()
    assert (seen == wanted).all()


def test_a_document_without_generated_tokens_has_no_window():
    assert cut(0, torch.zeros(5, dtype=torch.long), 10, 2) == []


def test_a_budget_too_small_for_the_steps_is_refused():
    with pytest.raises(ValueError, match=r"train.tokens_per_batch 6 is too small for 4 TTT steps; set it to 7"):
        cut(0, torch.ones(30), 6, 4)


def test_a_document_without_a_valid_position_has_no_window():
    """One token of prompt and one of answer: no draft starts before the first token."""
    assert cut(0, torch.tensor([0, 1]), budget=8, num_steps=2) == []
    assert cut(0, torch.tensor([0, 0]), budget=8, num_steps=2) == []
