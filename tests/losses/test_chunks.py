"""Which rows are scored together."""

import torch

from drafthead.losses.chunks import chunks


def test_chunks_list_every_valid_row_once_beside_its_teacher():
    # 3 steps, 5 tokens; teacher token of (step, index) is index + 1 + step.
    valid = torch.tensor([[1, 1, 0, 1, 0], [1, 0, 1, 0, 0], [0, 1, 0, 0, 0]]).bool()
    found = list(chunks(valid, 7))  # two teacher tokens each
    assert [chunk.tokens.tolist() for chunk in found] == [[1, 2], [4]]
    # by token: 1 meets (0, 0); 2 meets (0, 1) and (1, 0); 4 meets (0, 3), (1, 2) and (2, 1)
    assert [chunk.rows.tolist() for chunk in found] == [[0, 1, 5], [3, 7, 11]]
    assert [chunk.met.tolist() for chunk in found] == [[0, 1, 1], [0, 0, 0]]


def test_nothing_valid_makes_no_chunk():
    assert list(chunks(torch.zeros(3, 5).bool(), 7)) == []
