"""The loss of an optimiser step does not depend on how its documents are packed or shared out."""

from dataclasses import replace

import pytest
import torch

from drafthead.data.packing import whole
from drafthead.data.store import StateStore
from drafthead.drafters.registry import drafter_of
from drafthead.losses.objectives import OBJECTIVES, Target
from drafthead.training.trainer import LossModule, first_choices
from tests.data.sequences import as_harvested, document, sequence, store_of
from tests.drafters.small_draft import NUM_STEPS, dflash_model, eagle3, frozen, packed, peagle_model, small_model


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> StateStore:
    documents = [sequence(f"d{n}", n, layers=(0, 1, 2), hidden=8) for n in (9, 5, 14, 7)]
    return store_of(tmp_path_factory.mktemp("states"), *documents)


def gradients(store: StateStore, micro_batches: list[list[int]], objective: str) -> list[torch.Tensor]:
    """Gradient of one optimiser step over all documents, accumulated over these micro batches."""
    model = small_model(feature_weight=0.3)
    module, drafter = LossModule(model, objective), eagle3(NUM_STEPS)
    windows = [whole(i, store.tokens(i)[1], drafter) for i in range(len(store))]
    total = torch.tensor([w.valid for w in windows]).sum(0)
    scale = drafter.position_weights() / total
    for members in micro_batches:
        batch = packed(store, drafter, [windows[i] for i in members])
        module(batch, frozen(model), scale).loss.backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("micro_batches", [[[0], [1], [2], [3]], [[2, 0], [3, 1]], [[3, 2, 1, 0]]])
def test_any_packing_gives_the_same_gradient(store, objective, micro_batches):
    together = gradients(store, [[0, 1, 2, 3]], objective)
    for ours, expected in zip(gradients(store, micro_batches, objective), together, strict=True):
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-12)
    assert any(g.abs().max() > 1e-3 for g in together)


def test_what_a_step_hands_on_is_learned_where_drafts_are_and_validation_leaves_it_out(store):
    scale, batch, losses = torch.tensor([3.0, 2.0, 1.0]), packed(store, eagle3(NUM_STEPS)), []
    for weight in (0, 0.5):
        model = small_model(feature_weight=weight)
        losses.append(LossModule(model)(batch, frozen(model), scale))
        with torch.no_grad():
            validated = LossModule(model)(batch, frozen(model), scale)
        assert validated.loss == losses[0].loss
    embedded = frozen(model).embeddings[batch.input_ids]
    errors = torch.stack(model.unroll(batch.aux, embedded, batch.positions, batch.layout, NUM_STEPS)[1])
    expected = 0.5 * (errors * batch.scored * scale[:, None]).sum()
    torch.testing.assert_close(losses[1].loss - losses[0].loss, expected, rtol=1e-9, atol=0)
    assert torch.equal(losses[1].position_sums, losses[0].position_sums)


def test_losses_are_the_same_to_the_last_bit_without_the_rows_that_nothing_reads(tmp_path):
    """A harvest stores no teacher rows of prompts; the last token, never read by the target, has noise for states."""
    documents, losses = [document("a", list(range(9))), document("b", list(range(14)))], []
    documents[1].loss_mask[:5] = documents[1].loss_mask[-NUM_STEPS:] = 0  # validation goes on behind the response
    stores = [store_of(tmp_path / "full", *documents)]
    for written in documents:
        for rows in (*written.aux.values(), written.last_hidden, written.lse):
            rows[-1] = 50 * torch.randn(rows[-1].shape)
        written.argmax[-1] = 7
    stores.append(store_of(tmp_path / "stored", *map(as_harvested, documents)))
    model, drafter = small_model(), eagle3(NUM_STEPS)
    for store in stores:
        for validation in (False, True):
            batch = packed(store, drafter, whole_text=validation)
            scored = LossModule(model)(batch, frozen(model), torch.ones(NUM_STEPS))
            grads = torch.autograd.grad(scored.loss, list(model.parameters()))
            assert torch.equal(scored.predictions >= 0, batch.scored.flatten())
            hits = first_choices(scored, batch, frozen(model))
            losses.append((scored.position_sums, scored.predictions, hits, *grads))
    assert stores[1].stored(1).first_teacher_row == 4
    assert all(map(torch.equal, losses[0] + losses[1], losses[2] + losses[3]))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_at_a_temperature_target_and_draft_are_those_that_are_served(store, objective):
    """One token outside of the draft vocabulary: its logit follows from the log-sum-exp at temperature 1."""
    model, drafter, T = small_model(), eagle3(NUM_STEPS), 0.6
    target, batch = frozen(model), packed(store, drafter)
    logits = target.normed(batch.last_hidden) @ target.head_rows.T  # (Q, D)
    outside = logits.mean(1) + 1
    batch = replace(batch, lse=torch.logaddexp(logits.logsumexp(1), outside))
    loss = LossModule(model, objective, temperature=T)(batch, target, torch.ones(NUM_STEPS)).loss
    rows = model.head_rows(batch, target.embeddings, NUM_STEPS)
    scored = rows.teacher >= 0
    z, met = rows.states[scored] @ model.head_weight.T / T, rows.teacher[scored]
    log_p = (torch.cat([logits, outside[:, None]], 1) / T).log_softmax(1)[met, :-1]
    mass = log_p.exp().sum(1, keepdim=True)
    expected = OBJECTIVES[objective](z, Target(log_p - mass.log(), mass)).sum()
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=0)
    cold = LossModule(model, objective)(batch, target, torch.ones(NUM_STEPS)).loss
    assert float(loss) != pytest.approx(float(cold), rel=1e-3)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_infinite_lse_is_in_every_loss_that_is_reported(store, objective):
    """With it the target's probabilities are zeros, which the loss of a minimum takes for nothing to learn."""
    model = small_model()
    batch = packed(store, eagle3(NUM_STEPS))
    batch.lse[3] = torch.inf
    assert not LossModule(model, objective)(batch, frozen(model), torch.ones(NUM_STEPS)).position_sums.isfinite().any()


@pytest.mark.parametrize("build", [small_model, peagle_model, dflash_model])
def test_a_head_trained_on_zeroed_states_ignores_those_it_is_served(store, build):
    """No drafter reads the states but through fc, which the trainer keeps at zero (tests/pipeline/test_chain.py)."""
    model = build()
    torch.nn.init.zeros_(model.fc.weight)  # as a run begins
    model.fc.weight.register_hook(torch.zeros_like)
    drafter = drafter_of(model.shape.head)
    batch = packed(store, drafter)
    module, scale = LossModule(model), torch.ones(drafter.num_positions)
    module(batch, frozen(model), scale).loss.backward()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
        blind = module(replace(batch, aux=torch.zeros_like(batch.aux)), frozen(model), scale).loss
        served = module(batch, frozen(model), scale).loss
    assert served == blind
