"""P-EAGLE, DFlash and DSpark against naive serving: one root at a time, one dense softmax, in float64."""

from functools import partial

import pytest
import torch
from torch import Tensor

from drafthead.data.packing import pack, plan_stream, split_windows, whole
from drafthead.drafters import attention
from drafthead.drafters.dflash.drafter import DFlash, DFlashModel
from drafthead.drafters.peagle.drafter import PEagle
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.replay import match_text
from drafthead.losses.fused import HeadRows, Teacher, head_loss
from drafthead.training.inputs import survey
from tests.data.sequences import sequence, store_of
from tests.drafters.naive_reference import add_mlp, assert_parity, attend, naive_unroll, rms_norm, rotate_one
from tests.drafters.small_draft import dflash_model, dspark_model, packed, peagle_model, small_model, unrolled


def naive_block(model: DFlashModel, aux: Tensor, block: list[Tensor], first_position: int) -> Tensor:
    """(slots, H): the block of one root; aux (t + 1, N * H) of the root and all before it."""
    frequencies, factor = model.rope.frequencies.to(aux.dtype), model.rope.factor
    context = [rms_norm(model.fc.weight @ row, model.hidden_norm) for row in aux]
    states = block
    for layer in model.layers:
        attention, dim = layer.self_attn, layer.self_attn.head_dim
        inner = [rms_norm(state, layer.input_layernorm) for state in states]
        keys, values = [], []
        for i, state in enumerate([*context, *inner]):
            key = rms_norm((attention.k_proj.weight @ state).view(-1, dim), attention.k_norm)
            keys.append(rotate_one(key, first_position + i, frequencies, factor))
            values.append((attention.v_proj.weight @ state).view(-1, dim))
        out = []
        for j, (state, normed) in enumerate(zip(states, inner, strict=True)):
            query = rms_norm((attention.q_proj.weight @ normed).view(-1, dim), attention.q_norm)
            query = rotate_one(query, first_position + len(context) + j, frequencies, factor)
            # A window of W tokens reaches from W - 1 before the slot's own on, to the end of the block, or itself.
            start = max(len(context) + j - attention.window + 1, 0) if attention.window else 0
            seen = slice(start, len(context) + j + 1 if model.shape.head.causal else None)
            mixed = attend(query, keys[seen], values[seen], attention.attention_sink_bias)
            out.append(add_mlp(layer, state + attention.o_proj.weight @ mixed))
        states = out
    return torch.stack([rms_norm(state, model.norm) for state in states])


def naive_blocks(model, aux, embeddings, first_position, num_positions) -> Tensor:
    """(K, T - 1, H) from every root of one document."""
    before = model.num_unscored_slots
    masks = [torch.full((8,), 0.5, dtype=torch.float64)] * (num_positions - 1 + before)
    blocks = [
        naive_block(model, aux[: t + 1], [embeddings[t + 1], *masks], first_position)[before:]
        for t in range(len(aux) - 1)
    ]
    return torch.stack(blocks, dim=1)


def ours_blocks(model, aux, embeddings, positions, layout, num_positions) -> Tensor:
    known = torch.roll(embeddings[layout.rows], -1, 0)
    masks = [torch.full_like(known, 0.5)] * (num_positions - 1 + model.num_unscored_slots)
    return model.fill([known, *masks], aux, positions, layout)


KINDS = {
    "dflash": (dflash_model, ours_blocks, naive_blocks),
    "dflash_two_way": (partial(dflash_model, causal=False), ours_blocks, naive_blocks),
    "dflash_sinks": (partial(dflash_model, attention_sinks=True), ours_blocks, naive_blocks),
    "dspark": (dspark_model, ours_blocks, naive_blocks),
    "peagle": (partial(peagle_model, norm_before_residual=True, fc_norm=True), unrolled, naive_unroll),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("firsts", [None, [3, 0, 1]])
@pytest.mark.parametrize(
    ("num_layers", "num_aux_layers", "num_positions", "window"),
    [(1, 3, 1, None), (1, 2, 4, None), (3, 3, 3, None), (1, 3, 1, 3), (3, 3, 3, 5)],
)
def test_training_equals_serving_one_root_at_a_time(kind, firsts, num_layers, num_aux_layers, num_positions, window):
    build, ours, naive = KINDS[kind]
    model = build(num_layers, num_aux_layers, num_draft_positions=num_positions, sliding_window=window)
    assert_parity(model, ours, naive, [7, 2, 4], num_positions, firsts)


def test_peagle_trains_fewer_rows_the_deeper_they_are():
    head = peagle_model().head
    mask = torch.ones(10_000)
    trained = PEagle(head).trained_rows(mask)
    assert (trained.double().mean(1) - torch.tensor([1, 0.7, 0.49, 0.343, 0.2401, 0.2, 0.2])).abs().max() < 0.002
    assert not (trained[1:] & ~trained[:-1]).any(), "a position without the one before it"
    plain = head.model_copy(update={"depth_ratio": 1.0})
    assert torch.equal(PEagle(plain).trained_rows(mask), PEagle(plain).loss_rows(mask))


def test_anchors_are_whole_blocks_and_other_ones_in_each_epoch():
    head = dflash_model().shape.head.model_copy(update={"anchor_share": 0.3})
    mask = torch.ones(10_000)
    drawn = [DFlash(head).trained_rows(mask, draw) for draw in range(3)]
    for rows in drawn:
        assert abs(rows.double().mean().item() - 0.3) < 0.002
        assert torch.equal(rows[0, :-20], rows[-1, :-20]), "a block whose last position is not trained"
    assert len({tuple(rows[0].nonzero()[:, 0].tolist()) for rows in drawn}) == 3
    assert torch.stack(drawn).any(0)[0].double().mean() > 0.6


def test_an_epoch_takes_the_windows_of_its_own_draw(tmp_path):
    drafter = DFlash(dflash_model().shape.head.model_copy(update={"anchor_share": 0.4, "num_draft_positions": 3}))
    documents = [sequence(f"d{n}", n, layers=(1,), hidden=8) for n in range(12, 20)]
    store = store_of(tmp_path, *documents)
    token_survey = survey(store, 20, 40, drafter, draws=2)
    stream = plan_stream(store, token_survey.windows, 40, 0, 5)
    drawn = [(window.document, window.draw) for batch in stream for window in batch]
    assert sorted(drawn) == sorted((i, epoch % 2) for epoch in range(5) for i in range(8))
    scored = [
        pack(store, [w for w in token_survey.windows if w.draw == draw], drafter).scored.any(0).tolist()
        for draw in (0, 1)
    ]
    assert scored[0] != scored[1]


SHARES = {
    dflash_model: {"num_draft_positions": 3, "anchor_share": 0.4},
    dspark_model: {"num_draft_positions": 3, "anchor_share": 0.4},
    peagle_model: {"num_draft_positions": 3, "depth_ratio": 0.5},
    small_model: {"num_ttt_steps": 3},
}


@pytest.mark.parametrize(("num_layers", "window"), [(1, None), (2, None), (1, 10), (2, 10)])
@pytest.mark.parametrize("first", [2, 0])
@pytest.mark.parametrize("build", SHARES)
def test_rows_without_loss_change_neither_loss_nor_gradient(build, first, num_layers, window, tmp_path, monkeypatch):
    """A batch of chats as training reads it, of rows drawn in the third epoch, beside all of its rows computed."""
    monkeypatch.setattr(attention, "_BLOCK_ROWS", 3)
    model = build(num_layers=num_layers, sliding_window=window)
    drafter = drafter_of(model.shape.head.model_copy(update=SHARES[build]))
    documents = [sequence(f"d{n}", n, layers=(1, 2, 3), hidden=8) for n in (20, 9, 14)]
    for document in documents:
        document.loss_mask[:] = torch.arange(len(document.loss_mask)) >= first
    documents[0].loss_mask[6:14] = 0  # what the user said next
    store = store_of(tmp_path, *documents)
    windows = [window for i, d in enumerate(documents) for window in split_windows(i, d.loss_mask, 64, drafter, draw=2)]
    batch = packed(store, drafter, windows)
    assert batch.scored.sum(1).tolist() == torch.tensor([window.valid for window in windows]).sum(0).tolist()
    sizes, scale = (20, len(batch.argmax), 11), torch.tensor([1.0, 0.5, 0.25], dtype=torch.float64)
    embeddings, normed, target_rows = (torch.randn(n, 8, dtype=torch.float64) for n in sizes)
    gradients, trained = [], [p for n, p in model.named_parameters() if "confidence" not in n and n != "lm_head.weight"]
    chosen = drafter.computed_rows(batch.scored)
    for roots, model.recompute in (((), False), (chosen, True), (chosen, False)):
        rows = model.head_rows(batch.prepared(3, "cpu", roots), embeddings, 3)
        weight = model.head_weight.detach().requires_grad_()
        scored = head_loss(rows, weight, Teacher(normed, target_rows, batch.lse.double()), scale)
        grads = torch.autograd.grad(scored.loss, [weight, *trained], materialize_grads=True)
        gradients.append((scored, grads, len(rows.states)))
    (all_rows, all_grads, most), (_, recomputed_grads, _), (some, some_grads, computed) = gradients
    assert computed == (3 * int(batch.scored.any(0).sum()) if drafter.whole_blocks else int(batch.scored.sum())) < most
    torch.testing.assert_close(some.loss, all_rows.loss, rtol=0, atol=1e-12)
    torch.testing.assert_close(some.position_sums, all_rows.position_sums, rtol=0, atol=1e-12)
    assert torch.equal(some.predictions[some.predictions >= 0], all_rows.predictions[all_rows.predictions >= 0])
    for one, other, again in zip(some_grads, all_grads, recomputed_grads, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
        torch.testing.assert_close(one, again, rtol=0, atol=1e-12)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("build", SHARES)
def test_of_a_head_with_a_sliding_window_only_what_its_rows_depend_on_is_read(build, num_layers):
    """That it is enough, the next test shows."""
    K = {"num_ttt_steps": 3} if build is small_model else {"num_draft_positions": 3}
    drafter = drafter_of(build(num_layers=num_layers, sliding_window=6, **K).shape.head)
    mask = torch.arange(40) >= 30
    (window,) = split_windows(0, mask, 24, drafter)
    assert window.start == whole(0, mask, drafter).start
    assert (window.start, window.stop, window.first_row) == (28 - 5 * num_layers, 40, 28)


@pytest.mark.parametrize(("window", "num_layers"), [(None, 1), (None, 2), (6, 1), (6, 2)])
@pytest.mark.parametrize("build", SHARES)
def test_windows_of_a_long_document_give_its_whole_gradient(build, window, num_layers, tmp_path):
    """Ranks that share a document train as one that has all of it."""
    model = build(
        num_layers=num_layers, sliding_window=window, **({} if build is small_model else {"num_draft_positions": 4})
    )
    drafter, document = drafter_of(model.shape.head), sequence("a", 200, layers=(1, 2, 3), hidden=8)
    document.input_ids[:] = document.input_ids % 20
    store = store_of(tmp_path, document)
    budget, rows = (100, 47) if window is None else (60, 60 - 5 - 5 * num_layers)
    parts = split_windows(0, document.loss_mask, budget, drafter)
    assert [part.end_row - part.first_row for part in parts[:-1]] == [rows] * (len(parts) - 1)
    assert len(parts) > 3
    generator = torch.Generator().manual_seed(1)
    embeddings, weights = (torch.randn(n, 8, generator=generator, dtype=torch.float64) for n in (20, 800))
    trained, gradients = [p for n, p in model.named_parameters() if "confidence" not in n and n != "lm_head.weight"], []
    for windows in ([whole(0, document.loss_mask, drafter)], parts):
        sums = [torch.zeros_like(parameter) for parameter in trained]
        for window in windows:
            batch = packed(store, drafter, [window])
            rows = model.head_rows(batch, embeddings, 4)
            place = torch.arange(4)[:, None] * 200 + batch.positions[batch.layout.rows]  # of position and token
            loss = (rows.states[:, :8] * weights[place.flatten() % 800])[batch.scored.flatten()].sum()
            grads = torch.autograd.grad(loss, trained, materialize_grads=True)
            sums = [total + grad for total, grad in zip(sums, grads, strict=True)]
        gradients.append(sums)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-9)


def test_rows_are_selected_where_that_spares_a_tenth():
    drafter, scored = drafter_of(small_model().shape.head), torch.ones(4, 100, dtype=torch.bool)
    scored[2:, 1:] = False
    assert [len(rows) for rows in drafter.computed_rows(scored)] == [100, 100, 1, 1]
    scored[3] = False
    assert [rows.tolist() for rows in drafter.computed_rows(scored)[2:]] == [[0], [0]]
    assert drafter.computed_rows(torch.ones(4, 100, dtype=torch.bool)) == ()


@torch.no_grad()
def test_dspark_drafts_what_it_drafts_one_after_the_other_up_to_the_first_rejected_draft(tmp_path):
    """The naive loop, in which the bias of a draft is that of the draft before it, not of the text."""
    model, target_ids = dspark_model(num_draft_positions=3), torch.arange(11) % 2  # half of the drafts are the text's
    torch.nn.init.normal_(model.markov_head.markov_w2.weight)
    drafter, document = drafter_of(model.shape.head), sequence("a", 300, layers=(1, 2, 3), hidden=8)
    document.input_ids.random_(2, generator=torch.Generator().manual_seed(0))
    batch = packed(store_of(tmp_path, document), drafter)
    embeddings = torch.randn(20, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    previous, naive = batch.ahead(1), []
    for states in model.slots(batch, embeddings, 3):
        markov = model.markov_head.markov_w1(previous)
        naive.append((model.lm_head(states) + model.markov_head.markov_w2(markov)).argmax(-1))
        previous = target_ids[naive[-1]]
    naive, ours = torch.stack(naive), model.draft(batch, embeddings, 3)
    accepted = [match_text(drafts, target_ids, batch.row_ids).long().cumprod(0) for drafts in (naive, ours)]
    assert torch.equal(*accepted)
    assert 10 < accepted[0][2].sum() < accepted[0][0].sum() < 290
    assert not torch.equal(naive, ours)


def test_confidence_learns_what_is_accepted_and_changes_no_draft():
    model = dspark_model()
    states = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    logits = model.confidence(HeadRows(states, torch.zeros(6, dtype=torch.long), (6,)))
    logits.sum().backward()
    assert states.grad is None
    assert model.confidence_head.proj.bias.grad == 6
    torch.testing.assert_close(model.confidence_head.proj.weight.grad[0], states.detach().sum(0))
