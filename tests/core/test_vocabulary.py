"""d2t and t2d on a vocabulary of six."""

import pytest
import torch

from drafthead.core.vocabulary import choose_vocabulary, coverage

COUNTS = torch.tensor([5, 0, 9, 1, 0, 7])


def test_the_most_frequent_tokens_and_the_required_ones_are_chosen():
    vocabulary = choose_vocabulary(COUNTS, 3, required=torch.tensor([4]))
    assert vocabulary.target_ids.tolist() == [2, 4, 5]
    assert vocabulary.d2t.tolist() == [2, 3, 3]  # offsets
    assert vocabulary.t2d.tolist() == [False, False, True, False, True, True]
    assert coverage(COUNTS, vocabulary) == pytest.approx(16 / 22)


def test_a_full_vocabulary_has_no_offsets():
    assert choose_vocabulary(COUNTS, 6, torch.tensor([], dtype=torch.long)).d2t.tolist() == [0] * 6


@pytest.mark.parametrize(("size", "required", "text"), [(7, [], "vocabulary of 6"), (1, [0, 1], "2 special tokens")])
def test_impossible_sizes_are_refused(size, required, text):
    with pytest.raises(ValueError, match=text):
        choose_vocabulary(COUNTS, size, torch.tensor(required, dtype=torch.long))
