"""Loss up to the first rejected draft, against drafts walked one by one over plain logits, in float64."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from drafthead.data.packing import pack, whole
from drafthead.data.store import StateStore
from drafthead.drafters.registry import drafter_of
from drafthead.training.trainer import LossModule
from tests.data.sequences import document, store_of
from tests.drafters.small_draft import dflash_model, dspark_model, frozen, peagle_model, small_model

CPU = torch.device("cpu")
# Three target tokens stand for all draft ids, and the text is made of them: a third of the drafts is accepted.
TARGET_IDS = torch.arange(11) % 3 * 2


def drawn(length: int) -> list[int]:
    return (torch.randint(0, 3, (length,), generator=torch.Generator().manual_seed(length)) * 2).tolist()


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> StateStore:
    documents = document("a", drawn(37)), document("b", drawn(5)), document("chat", drawn(41), slice(15, 19))
    return store_of(tmp_path_factory.mktemp("states"), *documents)


def walked(model, batch, target, scale) -> tuple[torch.Tensor, int]:
    """Loss of one document and how many of its drafts were accepted, root by root and draft by draft: no root counts
    beyond the positions that the batch scores."""
    K = len(scale)
    rows = model.head_rows(batch, target.embeddings, K)
    log_q = (rows.states @ model.head_weight.T).log_softmax(-1).unflatten(0, (K, -1))
    log_r = (target.normed(batch.last_hidden) @ target.head_rows.T).log_softmax(-1)
    text, learned = batch.row_ids.tolist(), batch.loss_mask.tolist()
    loss, hits = torch.zeros((), dtype=torch.float64), 0
    for root in range(len(text) - 2):
        for k in range(K):
            if root + 2 + k >= len(text) or not all(learned[root + 2 : root + 3 + k]) or not batch.scored[k, root]:
                break
            hit = 2 * (int(log_q[k, root].argmax()) % 3) == text[root + 2 + k]
            q, r = log_q[k, root], log_r[batch.of_row[root + 1 + k]]
            loss = loss + scale[k] * (r.exp() * (r - q)).sum()
            if not hit:
                break
            hits += 1
    return loss, hits


@pytest.mark.parametrize("build", [small_model, peagle_model, partial(dflash_model, anchor_share=0.5), dspark_model])
def test_loss_and_gradients_are_those_of_drafts_walked_one_by_one(store, build):
    model = build()
    target, drafter = replace(frozen(model), target_ids=TARGET_IDS), drafter_of(model.shape.head)
    windows = [whole(i, store.tokens(i)[1], drafter) for i in range(len(store))]
    scale = torch.rand(drafter.num_positions, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    parameters = [p for name, p in model.named_parameters() if "confidence" not in name]

    module = LossModule(model, rejection=True)
    together, *alone = (pack(store, some, drafter) for some in (windows, *([w] for w in windows)))
    computed = drafter.computed_rows(together.scored)
    ours = module(together.prepared(drafter.num_positions, "cpu", computed).to(CPU, torch.float64), target, scale)
    alone = [batch.to(CPU, torch.float64) for batch in alone]
    parts = [walked(model, batch, target, scale) for batch in alone]
    expected, hits = sum(loss for loss, _ in parts), sum(hits for _, hits in parts)
    assert hits > 10, "where nothing is accepted, only first drafts are compared"
    torch.testing.assert_close((ours.position_sums * scale).sum(), expected.detach(), rtol=0, atol=1e-9)
    grads = [torch.autograd.grad(loss, parameters, allow_unused=True) for loss in (ours.loss, expected)]
    for one, other in zip(*grads, strict=True):
        assert (one is None) == (other is None)
        assert one is None or (one - other).abs().max() < 1e-9


def test_deeper_positions_of_peagle_are_replayed_at_every_row(store):
    drafter, mask = drafter_of(peagle_model().shape.head), store.tokens(0)[1]
    window, rows = whole(0, mask, drafter), drafter.loss_rows(mask)
    assert torch.equal(pack(store, [window], drafter).scored, drafter.trained_rows(mask)[:, window.first_row :])
    replayed = pack(store, [window], drafter, whole_text=True).scored
    assert replayed.sum() >= rows.sum() > drafter.trained_rows(mask).sum()
