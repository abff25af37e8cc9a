"""Replay of drafting rounds on texts small enough to follow by hand."""

import torch

from drafthead.drafters.replay import Acceptance, match_text, replay


def test_replay_walks_from_round_to_round():
    # index      0  1  2  3  4  5  6      tokens 2..6 generated, so the first root is 1
    mask = torch.tensor([0, 0, 1, 1, 1, 1, 1])
    matches = torch.zeros(2, 7, dtype=torch.bool)
    matches[:, 1] = True  # round at 1 accepts both drafts, the next root is 1 + 2 + 1 = 4
    matches[0, 4] = True  # round at 4 accepts one, the next root is 6: token 6 ended the response
    assert replay(matches, mask) == Acceptance(drafts=2, accepted_per_position=(2, 1))


def test_positions_no_round_starts_at_do_not_count():
    mask = torch.tensor([0, 1, 1, 1, 1, 1])
    matches = torch.ones(1, 6, dtype=torch.bool)
    # roots 0, 2 (4 would follow the last token)
    assert replay(matches, mask).drafts == 2
    assert replay(matches, mask).length == 2.0


def test_rounds_end_where_serving_ends():
    mask, matches = torch.tensor([0, 1, 1, 1, 1, 1, 1]), torch.ones(1, 7, dtype=torch.bool)
    # roots 0 and 2; the tokens served are 1..3, and what the second round accepts behind them counts, as in an engine
    assert replay(matches, mask, 4) == Acceptance(2, (2,))
    assert replay(matches, mask, 3) == Acceptance(1, (1,))
    assert replay(matches, mask) == Acceptance(3, (3,))


def test_only_the_last_generated_run_is_replayed():
    mask = torch.tensor([0, 1, 1, 0, 1, 1, 1])
    assert replay(torch.zeros(1, 7, dtype=torch.bool), mask) == Acceptance(2, (0,))


def test_a_one_token_answer_has_no_round():
    assert replay(torch.ones(1, 3, dtype=torch.bool), torch.tensor([0, 0, 1])) == Acceptance(0, (0,))
    assert replay(torch.ones(1, 3, dtype=torch.bool), torch.tensor([0, 0, 0])) == Acceptance(0, (0,))


def test_pooled_length_counts_the_bonus_token():
    pooled = Acceptance(3, (2, 1)) + Acceptance(1, (1, 1))
    assert pooled.length == 1 + 5 / 4
    assert pooled.rates == (3 / 4, 2 / 4)


def test_match_text_maps_draft_ids_and_shifts_per_step():
    target_ids = torch.tensor([10, 20, 30])
    text = torch.tensor([5, 10, 20, 30, 10])
    predictions = torch.tensor([[1, 2, 0, -1, -1], [2, -1, -1, -1, -1]])  # -1: outside the draft vocabulary
    assert match_text(predictions, target_ids, text).long().tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]
