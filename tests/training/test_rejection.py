"""Loss on the head's own rounds, against rounds walked token by token over plain logits, in float64."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from drafthead.config.train import RejectionConfig
from drafthead.data.packing import cut, pack, whole
from drafthead.data.store import StateStore
from drafthead.drafters.registry import drafter_of
from drafthead.training.rejection import started
from drafthead.training.trainer import LossModule
from tests.data.sequences import document, store_of
from tests.drafters.small_draft import dflash_model, dspark_model, eagle3, frozen, peagle_model, small_model

CPU = torch.device("cpu")
# Three target tokens stand for all draft ids, and the text is made of them: a third of the drafts is accepted.
TARGET_IDS = torch.arange(11) % 3 * 2
KL = {
    "forward_kl": lambda log_q, log_r: (log_r.exp() * (log_r - log_q)).sum(),
    "reverse_kl": lambda log_q, log_r: (log_q.exp() * (log_q - log_r)).sum(),
}


def drawn(length: int) -> list[int]:
    return (torch.randint(0, 3, (length,), generator=torch.Generator().manual_seed(length)) * 2).tolist()


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> StateStore:
    documents = document("a", drawn(37)), document("b", drawn(5)), document("chat", drawn(41), slice(15, 19))
    return store_of(tmp_path_factory.mktemp("states"), *documents)


def walked(model, batch, target, scale, objectives, roots) -> tuple[torch.Tensor, int]:
    """Loss of one document and how many of its drafts were accepted, root by root and draft by draft: no root counts
    beyond the positions that the batch scores."""
    K = len(scale)
    rows = model.head_rows(batch, target.embeddings, K)
    log_q = (rows.states @ model.head_weight.T).log_softmax(-1).unflatten(0, (K, -1))
    log_r = (target.normed(batch.last_hidden) @ target.head_rows.T).log_softmax(-1)
    text, said = batch.row_ids.tolist(), batch.loss_mask.tolist()
    loss, hits, due = torch.zeros((), dtype=torch.float64), 0, 0
    for root in range(len(text) - 2):
        if roots == "rounds" and not (root >= due and said[root + 1]):
            continue
        accepted = 0
        for k in range(K):
            if root + 2 + k >= len(text) or not all(said[root + 2 : root + 3 + k]) or not batch.scored[k, root]:
                break
            hit = 2 * (int(log_q[k, root].argmax()) % 3) == text[root + 2 + k]
            loss = loss + scale[k] * KL[objectives[not hit]](log_q[k, root], log_r[batch.of_row[root + 1 + k]])
            if not hit:
                break
            accepted += 1
        hits, due = hits + accepted, root + accepted + 1
    return loss, hits


@pytest.mark.parametrize("roots", ["rounds", "all"])
@pytest.mark.parametrize("rejected", ["reverse_kl", "forward_kl"])
@pytest.mark.parametrize("build", [small_model, peagle_model, partial(dflash_model, anchor_share=0.5), dspark_model])
def test_loss_and_gradients_are_those_of_rounds_walked_one_by_one(store, build, rejected, roots):
    model = build()
    target, drafter = replace(frozen(model), target_ids=TARGET_IDS), drafter_of(model.shape.head)
    windows = [whole(i, store.tokens(i)[1], drafter) for i in range(len(store))]
    scale = torch.rand(drafter.num_positions, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parameters = [p for name, p in model.named_parameters() if "confidence" not in name]

    module = LossModule(model, rejection=RejectionConfig(objective=rejected, roots=roots))
    together, *alone = (pack(store, some, drafter, thin=roots == "all") for some in (windows, *([w] for w in windows)))
    computed = drafter.computed_rows(together.scored) if roots == "all" else ()
    ours = module(together.prepared(drafter.num_positions, "cpu", computed).to(CPU, torch.float64), target, scale)
    alone = [batch.to(CPU, torch.float64) for batch in alone]
    parts = [walked(model, batch, target, scale, ("forward_kl", rejected), roots) for batch in alone]
    wanted, hits = sum(loss for loss, _ in parts), sum(hits for _, hits in parts)
    assert hits > 10, "where nothing is accepted, rounds are not told from roots"
    torch.testing.assert_close((ours.position_sums * scale).sum(), wanted.detach(), rtol=0, atol=1e-9)
    grads = [torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (ours.loss, wanted)]
    for one, other in zip(*grads, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one - other).abs().max() < 1e-9


def test_a_window_within_a_response_begins_with_a_round(store):
    drafter = eagle3(3)
    windows = cut(0, store.tokens(0)[1], 20, drafter)
    batch = pack(store, [windows[1]], drafter)
    assert batch.loss_mask.all()
    starts = started([3] * len(batch.loss_mask), batch)
    assert starts.nonzero()[:, 0].tolist() == list(range(0, len(starts) - 2, 4))


def test_deeper_positions_of_peagle_are_replayed_at_every_row(store):
    drafter, mask = drafter_of(peagle_model().shape.head), store.tokens(0)[1]
    window, rows = whole(0, mask, drafter), drafter.loss_rows(mask)
    for thin, scored in ((True, drafter.trained_rows(mask)), (False, rows)):
        assert torch.equal(pack(store, [window], drafter, thin=thin).scored, scored[:, window.first_row :])
    assert rows.sum() > drafter.trained_rows(mask).sum()
