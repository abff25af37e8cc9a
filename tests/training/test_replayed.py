"""What the predicted acceptance counts: answers that evaluation counts too, and no others."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafthead.data.store import StateStore
from drafthead.drafters.replay import Acceptance, empty_acceptance
from drafthead.training.trainer import LossModule, replayed, replayed_documents
from tests.data.sequences import document, store_of
from tests.drafters.small_draft import NUM_STEPS, eagle3, frozen, packed, small_model

# The first two tokens of each are the prompt; the vocabulary has 20 tokens.
FRESH = [*range(20)]
LOOP = [7, 8, *[1, 2, 3] * 9]
LOOPED_BEFORE = [*LOOP, 9, 9, *range(5, 19)]  # a chat: an earlier turn loops, the last one does not


def _store(directory: Path, **texts: list[int]) -> StateStore:
    directory.mkdir(exist_ok=True)
    spoken = {"chat": slice(len(LOOP), len(LOOP) + 2)}  # by the user
    return store_of(directory, *(document(name, text, spoken.get(name, slice(0, 0))) for name, text in texts.items()))


def _acceptance(store: StateStore, max_tokens: int = 99) -> Acceptance:
    model, drafter, total = small_model(), eagle3(NUM_STEPS), empty_acceptance(NUM_STEPS)
    for window in replayed_documents(store, drafter, max_tokens)[0]:
        batch = packed(store, drafter, [window], whole_text=True)
        with torch.no_grad():
            scored = LossModule(model)(batch, frozen(model), torch.zeros(NUM_STEPS))
        drafts = scored.predictions.view(batch.scored.shape)
        total += replayed(drafts, frozen(model).target_ids, batch, NUM_STEPS, max_tokens)
        proposed = model.draft(batch, frozen(model).embeddings, NUM_STEPS)
        assert torch.equal(proposed[batch.scored], drafts[batch.scored])  # what an export check replays
    return total


def test_answers_that_loop_are_left_out(tmp_path):
    store = _store(tmp_path, fresh=FRESH, loop=LOOP, chat=LOOPED_BEFORE)
    documents, looping = replayed_documents(store, eagle3(NUM_STEPS), 99)
    assert [store.ids[w.document] for w in documents] == ["fresh", "chat"]
    assert not looping
    without = _store(tmp_path / "without", fresh=FRESH, chat=LOOPED_BEFORE)
    assert _acceptance(store) == _acceptance(without)
    assert _acceptance(store).drafts > 10


def test_where_every_answer_loops_they_are_replayed(tmp_path):
    store = _store(tmp_path, loop=LOOP)
    assert replayed_documents(store, eagle3(NUM_STEPS), 99)[1]
    assert _acceptance(store).drafts > 5


def test_no_more_is_replayed_and_judged_than_evaluation_serves(tmp_path):
    """A response that loops only behind what is served of it counts; its first tokens are all that counts."""
    late, cut = [*range(10), *[1, 2, 3] * 9], [*range(10)]
    store, alone = (_store(tmp_path / name, late=text) for name, text in (("whole", late), ("cut", cut)))
    assert [replayed_documents(store, eagle3(NUM_STEPS), n)[1] for n in (8, 99)] == [False, True]
    assert _acceptance(store, 8).drafts == _acceptance(alone).drafts < _acceptance(store).drafts


def test_without_a_round_to_replay_training_is_refused(tmp_path):
    mask = torch.zeros(len(FRESH), dtype=torch.uint8)
    mask[5] = 1
    store = store_of(tmp_path, replace(document("one", FRESH), loss_mask=mask))
    with pytest.raises(ValueError, match="none of the 1 validation responses"):
        replayed_documents(store, eagle3(NUM_STEPS), 99)
