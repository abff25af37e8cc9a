"""Shifting and masks, with the expected matrices written out."""

import torch

from drafthead.drafters.eagle3.alignment import document_index, shift, valid_positions


def test_shift_moves_left_and_fills_the_end():
    assert shift(torch.tensor([1, 2, 3]), 1).tolist() == [2, 3, 0]
    assert shift(torch.tensor([1, 2, 3]), 5, -1).tolist() == [-1, -1, -1]


def test_every_token_knows_its_document():
    assert document_index(torch.tensor([0, 2, 3, 3, 5])).tolist() == [0, 0, 1, 3, 3]


def test_positions_whose_target_was_generated_are_valid():
    # tokens        P  P  G  G  G  G
    mask = torch.tensor([0, 0, 1, 1, 1, 1])
    assert valid_positions(mask, torch.tensor([0, 6]), 3).long().tolist() == [
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
    ]


def test_no_position_counts_across_a_document_boundary():
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1])
    assert valid_positions(mask, torch.tensor([0, 3, 7]), 2).long().tolist() == [
        [1, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 1, 0, 0, 0],
    ]


def test_a_gap_in_the_mask_stops_deeper_steps():
    # a user turn between two answers: x[4] was not generated
    mask = torch.tensor([0, 1, 1, 1, 0, 1, 1, 1])
    assert valid_positions(mask, torch.tensor([0, 8]), 2).long().tolist() == [
        [1, 1, 0, 1, 1, 1, 0, 0],
        [1, 0, 0, 1, 1, 0, 0, 0],
    ]
