"""d2t and t2d on a vocabulary of six."""

import pytest
import torch

from drafthead.drafters.vocabulary import choose_vocabulary, coverage, size_for_coverage

COUNTS = torch.tensor([5, 0, 9, 1, 0, 7])


def test_the_most_frequent_tokens_and_the_required_ones_are_chosen():
    vocabulary = choose_vocabulary(COUNTS, 3, required=torch.tensor([4]))
    assert vocabulary.target_ids.tolist() == [2, 4, 5]
    assert vocabulary.d2t.tolist() == [2, 3, 3]  # offsets
    assert vocabulary.t2d.tolist() == [False, False, True, False, True, True]
    assert coverage(COUNTS, vocabulary) == pytest.approx(16 / 22)


def test_a_full_vocabulary_has_no_offsets():
    assert choose_vocabulary(COUNTS, 6, torch.tensor([], dtype=torch.long)).d2t.tolist() == [0] * 6


def test_fewer_tokens_than_must_be_in_it_are_refused():
    with pytest.raises(ValueError, match="2 special tokens"):
        choose_vocabulary(COUNTS, 1, torch.tensor([0, 1]))


NONE = torch.tensor([], dtype=torch.long)


@pytest.mark.parametrize(
    ("share", "required", "size"),
    # counts 9 7 5 1 of 22; required tokens come first, whatever they cover
    [(9 / 22, [], 1), (0.5, [], 2), (0.98, [], 4), (1.0, [], 4), (0.5, [1], 3), (0.5, [1, 2, 4], 4), (1e-9, [], 1)],
)
def test_coverage_takes_as_few_tokens_as_reach_it(monkeypatch, share, required, size):
    monkeypatch.setattr("drafthead.drafters.vocabulary._MULTIPLE", 1)  # sizes that are not rounded up
    required = torch.tensor(required, dtype=torch.long)
    assert size_for_coverage(COUNTS, share, required) == size
    vocabulary = choose_vocabulary(COUNTS, size, required)
    assert coverage(COUNTS, vocabulary) >= share - 1e-6  # float32
    if size > max(len(required), 1):
        assert coverage(COUNTS, choose_vocabulary(COUNTS, size - 1, required)) < share


def test_sizes_chosen_by_coverage_are_round_and_within_the_vocabulary():
    counts = torch.arange(200, 0, -1)
    assert size_for_coverage(counts, 0.3, NONE) == 64
    assert size_for_coverage(counts, 0.9, NONE) == 192
    assert size_for_coverage(counts, 1.0, NONE) == 200


def test_a_share_of_nothing_is_refused():
    with pytest.raises(ValueError, match="the target generated no token"):
        size_for_coverage(torch.zeros(4, dtype=torch.long), 0.9, NONE)
