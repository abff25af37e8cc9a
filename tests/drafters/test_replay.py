"""Replay of drafting rounds on texts small enough to follow by hand."""

import numpy as np
import pytest
import torch
from torch.nn.functional import one_hot

from drafthead.data.packing import pack, whole
from drafthead.data.store import StateStore
from drafthead.drafters.base import draft_shape
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.replay import Acceptance, expected, match_text, replay
from drafthead.drafters.vocabulary import choose_vocabulary
from drafthead.exporting.check import choose_documents, expected_rounds, replayed_rounds
from drafthead.target.pieces import final_normed, load_pieces
from drafthead.target.spec import load_target_spec
from tests.data.sequences import sequence, store_of
from tests.drafters.small_draft import eagle3, packed, small_model
from tests.training.synthetic import small_recipe, synthetic_store


@pytest.mark.parametrize(
    ("generated", "first", "second", "limit", "wanted"),
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
def test_replay_walks_from_round_to_round_where_serving_would(generated, first, second, limit, wanted):
    matches = torch.zeros(2, len(generated), dtype=torch.bool)
    matches[0, list(first)] = matches[1, list(second)] = True
    assert replay(matches, torch.tensor(generated), limit) == wanted


def test_match_text_maps_draft_ids_and_shifts_per_step():
    target_ids = torch.tensor([10, 20, 30])
    text = torch.tensor([5, 10, 20, 30, 10])
    predictions = torch.tensor([[1, 2, 0, -1, -1], [2, -1, -1, -1, -1]])  # -1: outside the draft vocabulary
    assert match_text(predictions, target_ids, text).long().tolist() == [[1, 1, 1, 0, 0], [1, 0, 0, 0, 0]]


def drawn(weights, rng) -> int:
    total = weights.cumsum()
    return int(np.searchsorted(total, rng.random() * total[-1], side="right"))


def naive_rounds(p, q, first: int, length: int, rng) -> tuple[list[int], list[int]]:
    """A response as an engine makes it that drafts and rejects by chance: its tokens, and drafts accepted per round.

    Args:
        p: (V, V) the target's next token after each token.
        q: (K, V, V) that of the draft, at each position.
    """
    K = len(q)
    text, counts = [first, drawn(p[first], rng)], []
    while len(text) <= length:
        accepted = 0
        for k in range(K):
            before = text[-1]
            draft = drawn(q[k, before], rng)
            if rng.random() >= min(1, p[before, draft] / q[k, before, draft]):
                text.append(drawn(np.maximum(p[before] - q[k, before], 0), rng))
                break
            accepted += 1
            text.append(draft)
        else:
            text.append(drawn(p[text[-1]], rng))
        counts.append(accepted)
    return text, counts


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy drafts", "sampled drafts"])
def test_expected_rounds_are_those_of_rejection_sampling(greedy):
    """An engine of five tokens, simulated, against texts that its target samples alone."""
    rng, (V, K, length, texts) = np.random.default_rng(0), (5, 3, 24, 2000)
    p = rng.dirichlet(np.full(V, 0.6), V)
    q = np.stack([0.7 * p + 0.3 * rng.dirichlet(np.full(V, 0.6), V) for _ in range(K)])
    if greedy:
        q = np.eye(V)[q.argmax(-1)]
    counted = [naive_rounds(p, q, 0, length, rng)[1] for _ in range(texts)]
    predicted = []
    for _ in range(texts):
        text = [0]
        while len(text) < 1 + length + K:
            text.append(drawn(p[text[-1]], rng))
        x, chance, given = np.array(text), np.zeros((K, len(text))), np.zeros((K, len(text)))
        for k in range(K):
            before, after = x[1 + k : -1], x[2 + k :]
            chance[k, : len(after)] = np.minimum(p, q[k]).sum(-1)[before]
            given[k, : len(after)] = np.minimum(1, q[k][before, after] / p[before, after])
        mask = torch.zeros(len(text))
        mask[1 : 1 + length] = 1
        predicted.append(expected(torch.tensor(chance), torch.tensor(given), mask))
    found = np.array([[one.drafts, *one.accepted_per_position] for one in predicted])
    wanted = np.array([[len(rounds), *(sum(n > k for n in rounds) for k in range(K))] for rounds in counted])
    error = np.sqrt((found.var(0) + wanted.var(0)) / texts)
    assert (np.abs(found.mean(0) - wanted.mean(0)) < 3 * error).all(), (found.mean(0), wanted.mean(0), error)
    assert (found.var(0)[1:] < wanted.var(0)[1:]).all()  # what remains by chance is the text alone
    if greedy:  # and what is no longer by chance are the rounds of a replay
        matches = torch.tensor(given).bool()
        assert replay(matches, mask).drafts == predicted[-1].drafts


def test_of_one_likely_text_the_expected_rounds_are_the_replayed_ones():
    mask, matches = torch.tensor([0, 0, 1, 1, 1, 1, 1]), torch.rand(2, 7, generator=torch.manual_seed(0)) > 0.5
    assert expected(matches.double(), matches.double(), mask, 4) == replay(matches, mask, 4)
    assert expected(matches.double(), matches.double(), torch.zeros(7)) == Acceptance(0, (0, 0))


def test_more_drafts_than_steps_of_training_begin_with_those(tmp_path):
    """What `eval/compare.py --lengths` asks of a head that was trained at fewer steps."""
    store, model, found = store_of(tmp_path, sequence("a", 20, layers=(1, 2, 3), hidden=8)), small_model(), []
    for steps, drafts in ((2, 2), (2, 4), (4, 4)):
        drafter = eagle3(steps)
        found.append(model.draft(packed(store, drafter), torch.ones(40, 8, dtype=torch.float64), drafts))
    assert torch.equal(found[0], found[1][:2])
    assert torch.equal(found[1], found[2])


@pytest.mark.parametrize("head", ["eagle3", "peagle", "dflash", "dspark"])
@torch.no_grad()
def test_expected_acceptance_of_a_head_is_computed_from_stored_states(head, tmp_path):
    """Root by root over the target's whole vocabulary; and at a temperature near 0 it is what replay counts."""
    parallel = ("head.mask_token_id=9", "head.num_draft_positions=3") if head != "eagle3" else ()
    recipe = small_recipe(tmp_path, f"head.type={head}", *parallel)
    synthetic_store(recipe, "validation", 4, seed=1)
    store, K = StateStore(recipe.states_dir("validation")), recipe.eval.num_draft_tokens
    documents, _ = choose_documents(store, recipe, drop_loops=False)
    spec, pieces = load_target_spec(recipe.target_path), load_pieces(recipe.target_path)
    drafter = drafter_of(recipe.head)
    counts = torch.cat([store.tokens(i)[0] for i in range(len(store))]).bincount(minlength=spec.vocab_size)
    vocabulary = choose_vocabulary(counts, recipe.head.draft_vocab_size, torch.tensor([0]))
    shape = draft_shape(recipe.head, spec, recipe.target.aux_layer_ids)
    model = drafter.from_target(shape, pieces, vocabulary, seed=0)
    for parameter in model.parameters():
        parameter += 0.3 * parameter.std(correction=0) * torch.randn(parameter.shape)
    weights = {**model.state_dict(), "d2t": vocabulary.d2t, "t2d": vocabulary.t2d}

    cold, _ = expected_rounds(recipe, store, documents, weights, shape, 1e-3)
    replayed = replayed_rounds(recipe, store, documents, weights, shape)
    for one, other in zip(cold, replayed, strict=True):
        assert one.drafts == pytest.approx(other.drafts)
        assert one.accepted_per_position == pytest.approx(other.accepted_per_position)

    T, ids = 3.0, vocabulary.target_ids
    lm_head, final_norm = pieces.lm_head.float(), pieces.final_norm.float()
    found = expected_rounds(recipe, store, documents, weights, shape, T)
    for i, document in enumerate(documents):
        text, mask = store.tokens(document.index)
        batch = pack(store, [whole(document.index, mask, drafter)], drafter).to(torch.device("cpu"), torch.float32)
        first = len(text) - len(batch.of_row)  # of the rows
        logits = model.head_rows(batch, pieces.embed_tokens.float(), K).states.view(K, len(batch.of_row), -1)
        logits = logits @ model.head_weight.T / T
        for sampled in (False, True):
            chance, given = torch.zeros(2, K, len(batch.of_row))
            for k in range(K):
                for row in range(len(batch.of_row) - 2 - k):
                    met = int(batch.of_row[row + 1 + k])
                    if met < 0:
                        continue
                    state = final_normed(batch.last_hidden[met], final_norm, spec.rms_norm_eps)
                    p = (lm_head @ state / T).softmax(0)
                    q = torch.zeros(spec.vocab_size).index_copy(0, ids, logits[k, row].softmax(0))
                    q = q if sampled else one_hot(q.argmax(), spec.vocab_size)
                    x = int(text[first + row + 2 + k])
                    chance[k, row], given[k, row] = torch.minimum(p, q).sum(), min(1.0, float(q[x] / p[x]))
            wanted, ours = expected(chance, given, batch.loss_mask, recipe.eval.max_tokens), found[sampled][i]
            assert (ours.drafts, *ours.accepted_per_position) == pytest.approx(
                (wanted.drafts, *wanted.accepted_per_position), rel=1e-3, abs=1e-6
            )
            assert ours.drafts > 0 < ours.accepted
