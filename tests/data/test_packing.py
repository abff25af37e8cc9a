"""Windows and packed batches: no loss row lost or counted twice, within budget, and the same on every rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafthead.data.packing import Window, pack, plan_epoch, split_windows, whole, window_tokens
from tests.data.sequences import sequence, store_of
from tests.drafters.small_draft import eagle3


def windows_of(lengths) -> list[Window]:
    return [Window(i, 0, n, 0, n, (n,)) for i, n in enumerate(lengths)]


def test_budgets_are_well_filled():
    lengths = torch.randint(20, 600, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    plan = plan_epoch(windows_of(lengths), 2048, 0, 0)
    assert sum(lengths) / (len(plan) * 2048) > 0.95


@pytest.mark.parametrize("number_format", ["bf16", "fp8"])
def test_documents_are_laid_end_to_end_as_stored_and_cast_to_what_reading_gives(tmp_path, number_format):
    documents = [sequence("a", 3), sequence("b", 5)]
    store = store_of(tmp_path, *documents, number_format=number_format)
    batch = pack(store, [whole(i, d.loss_mask, eagle3(2)) for i, d in enumerate(documents)], eagle3(2))
    assert batch.layout.cu_seqlens.tolist() == [0, 3, 8]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert batch.input_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert batch.aux.dtype == (torch.float8_e4m3fn if number_format == "fp8" else torch.bfloat16)
    expected = torch.cat([torch.cat([store[i].aux[1], store[i].aux[3]], dim=-1) for i in (0, 1)])
    for dtype in (torch.bfloat16, torch.float32):
        torch.testing.assert_close(batch.cast(dtype).aux, expected.to(dtype), rtol=0, atol=0)


def test_what_only_the_loss_reads_is_kept_for_the_loss_rows(tmp_path):
    one = sequence("a", 9)
    one.loss_mask[:5] = 0  # tokens 5..8 were generated, so rows begin at 3
    batch = pack(store_of(tmp_path, one), [whole(0, one.loss_mask, eagle3(2))], eagle3(2))
    assert batch.layout.rows.tolist() == [3, 4, 5, 6, 7, 8]
    assert batch.row_ids.tolist() == [3, 4, 5, 6, 7, 8]
    assert batch.loss_mask.tolist() == [False, False, True, True, True, True]
    torch.testing.assert_close(batch.last_hidden, one.last_hidden[3:], rtol=0, atol=0)
    assert batch.argmax.tolist() == [8, 9, 10, 11, 12, 13]


def test_a_window_keeps_its_true_positions_and_counts_its_own_rows(tmp_path):
    one = sequence("a", 12)
    batch = pack(store_of(tmp_path, one), [Window(0, 3, 10, 5, 7, (2,))], eagle3(1))
    assert batch.positions.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert batch.row_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.scored.tolist() == [[True, True, False, False, False]]
    assert batch.of_row.tolist() == [0, 1, 2, 3, 4]
    torch.testing.assert_close(batch.aux[:, :4], one.aux[1][3:10], rtol=0, atol=0)


def test_a_short_document_is_one_window():
    mask = torch.tensor([0, 0, 0, 1, 1])
    (window,) = split_windows(7, mask, budget=8, drafter=eagle3(2))
    assert window == whole(7, mask, eagle3(2))
    assert (window.document, window.start, window.stop, window.first_row, window.end_row) == (7, 0, 5, 1, 5)
    assert window.valid == (2, 1)


def test_the_example_of_the_docstring():
    mask = (torch.arange(12) >= 6).long()
    spans = [(w.start, w.stop, w.first_row, w.end_row) for w in split_windows(0, mask, budget=8, drafter=eagle3(1))]
    assert spans == [(0, 9, 4, 7), (0, 12, 7, 10)]


def test_a_window_takes_no_more_memory_than_a_budget_of_rows():
    """Rows 6.. of 40 tokens, three in a window, each as much as three tokens of context."""
    windows = split_windows(0, torch.arange(40) >= 8, budget=8, drafter=eagle3(1))
    assert {w.end_row - w.first_row for w in windows[:-1]} == {3}
    assert [w.num_tokens for w in windows] == [min(w.stop, 8 + 2 * 5) for w in windows]


@given(st.lists(st.booleans(), min_size=1, max_size=120), st.integers(10, 40), st.integers(1, 7))
def test_every_valid_position_is_in_exactly_one_window(bits, budget, num_steps):
    mask = torch.tensor(bits)
    windows = split_windows(0, mask, budget, eagle3(num_steps))
    seen = torch.zeros(num_steps, len(mask), dtype=torch.long)
    for window in windows:
        assert window.num_tokens <= window_tokens(budget, (budget - num_steps - 1) // 2)
        assert window.start <= window.first_row < window.end_row <= window.stop
        # What the window itself can see is what it counts.
        inside = eagle3(num_steps).loss_rows(mask[window.start : window.stop])
        rows = slice(window.first_row - window.start, window.end_row - window.start)
        assert tuple(inside[:, rows].sum(1).tolist()) == window.valid
        seen[:, window.first_row : window.end_row] += inside[:, rows].long()
    expected = eagle3(num_steps).loss_rows(mask).long()
    assert (seen == expected).all()


def test_a_budget_too_small_for_the_steps_is_refused():
    with pytest.raises(ValueError, match=r"train.tokens_per_batch 6 .* 7 or more"):
        split_windows(0, torch.ones(30), 6, eagle3(4))


def test_a_document_without_a_valid_position_has_no_window():
    """One token of prompt and one of answer: no draft starts before the first token."""
    assert split_windows(0, torch.tensor([0, 1]), budget=8, drafter=eagle3(2)) == []
    assert split_windows(0, torch.tensor([0, 0]), budget=8, drafter=eagle3(2)) == []
