"""Replay of drafting rounds on texts small enough to follow by hand."""

import pytest
import torch

from drafthead.drafters.replay import Acceptance, match_text, replay
from tests.data.sequences import sequence, store_of
from tests.drafters.small_draft import eagle3, packed, small_model


@pytest.mark.parametrize(
    ("generated", "first", "second", "limit", "expected"),
    [
        # 1 accepts both drafts, so the next root is 1 + 2 + 1 = 4; 4 accepts one, the next is 6: token 6 was the last
        ([0, 0, 1, 1, 1, 1, 1], [1, 4], [1], None, Acceptance(2, (2, 1))),
        # roots 0 and 2; 4 would follow the last token, and no round starts at 1 or 3
        ([0, 1, 1, 1, 1, 1], range(6), (), None, Acceptance(2, (2, 0))),
        # what the second round accepts behind the tokens served counts, as in an engine
        ([0, 1, 1, 1, 1, 1, 1], range(7), (), 4, Acceptance(2, (2, 0))),
        ([0, 1, 1, 1, 1, 1, 1], range(7), (), 3, Acceptance(1, (1, 0))),
        ([0, 1, 1, 1, 1, 1, 1], range(7), (), None, Acceptance(3, (3, 0))),
        # the last generated run alone
        ([0, 1, 1, 0, 1, 1, 1], (), (), None, Acceptance(2, (0, 0))),
        ([0, 0, 1], range(3), range(3), None, Acceptance(0, (0, 0))),
        ([0, 0, 0], range(3), range(3), None, Acceptance(0, (0, 0))),
    ],
)
def test_replay_walks_from_round_to_round_where_serving_would(generated, first, second, limit, expected):
    matches = torch.zeros(2, len(generated), dtype=torch.bool)
    matches[0, list(first)] = matches[1, list(second)] = True
    assert replay(matches, torch.tensor(generated), limit) == expected


def test_match_text_maps_draft_ids_and_shifts_per_step():
    target_ids = torch.tensor([10, 20, 30])
    text = torch.tensor([5, 10, 20, 30, 10])
    predictions = torch.tensor([[1, 2, 0, -1, -1], [2, -1, -1, -1, -1]])  # -1: outside the draft vocabulary
    assert match_text(predictions, target_ids, text).long().tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]


def test_more_drafts_than_steps_of_training_begin_with_those(tmp_path):
    """What `eval/compare.py --lengths` asks of a head that was trained at fewer steps."""
    store, model, by_length = store_of(tmp_path, sequence("a", 20, layers=(1, 2, 3), hidden=8)), small_model(), []
    for steps, drafts in ((2, 2), (2, 4), (4, 4)):
        drafter = eagle3(steps)
        by_length.append(model.draft(packed(store, drafter), torch.ones(40, 8, dtype=torch.float64), drafts))
    assert torch.equal(by_length[0], by_length[1][:2])
    assert torch.equal(by_length[1], by_length[2])
