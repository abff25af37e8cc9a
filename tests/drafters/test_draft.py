"""The unrolled draft model against naive sequential decoding."""

import itertools
from contextlib import nullcontext

import pytest
import torch

from drafthead.drafters.base import valid_positions
from drafthead.drafters.batch import tail_layout
from drafthead.drafters.eagle3 import drafter as draft
from tests.drafters.naive_reference import assert_parity, naive_unroll
from tests.drafters.small_draft import small_model, unrolled

NORMS = [
    dict(zip(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), flags, strict=True))
    for flags in itertools.product((False, True), repeat=4)
]


@pytest.mark.parametrize("norms", NORMS, ids=lambda n: "+".join(k for k, v in n.items() if v) or "none")
def test_unroll_equals_sequential_decoding_for_every_norm(norms):
    check_parity(small_model(**norms), lengths=[5, 7], num_steps=3)


@pytest.mark.parametrize("num_steps", [1, 2, 5, 7])
@pytest.mark.parametrize(("num_aux_layers", "num_layers"), [(1, 1), (2, 2), (4, 3)])
def test_unroll_equals_sequential_decoding_for_aux_states_layers_and_steps(num_steps, num_aux_layers, num_layers):
    check_parity(small_model(num_aux_layers, num_layers), lengths=[8, 2, 4], num_steps=num_steps)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("firsts", [[5, 0, 3], [0, 1, 4]])
def test_rows_without_loss_can_be_left_out(num_layers, firsts):
    check_parity(small_model(num_layers=num_layers), lengths=[8, 3, 5], num_steps=4, firsts=firsts)


@pytest.mark.parametrize(("num_layers", "window"), [(1, 6), (3, 7)])
@pytest.mark.parametrize("firsts", [None, [9, 0, 1]])
def test_a_sliding_window_equals_sequential_decoding(num_layers, window, firsts):
    model = small_model(num_layers=num_layers, num_ttt_steps=4, sliding_window=window)
    check_parity(model, lengths=[14, 3, 9], num_steps=4, firsts=firsts)


def test_plain_rope_is_supported():
    check_parity(small_model(rope={"rope_type": "default", "rope_theta": 10000.0}), lengths=[6], num_steps=3)


@pytest.mark.parametrize("norm_output", [False, True])
def test_recomputed_steps_give_the_same_gradients_and_keep_less(norm_output, monkeypatch):
    monkeypatch.setattr(draft, "recomputing", nullcontext)  # its hooks would hide from ours what is kept
    model, num_steps, length = small_model(num_layers=2, norm_output=norm_output), 4, 9
    aux = torch.randn(length, 3 * 8, dtype=torch.float64)
    embeddings = torch.randn(length, 8, dtype=torch.float64)
    layout, grads, kept = tail_layout([length], [0]), [], []
    for model.recompute in (False, True):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, s=saved: s.append(t.numel()) or t, lambda t: t):
            states = torch.stack(model.unroll(aux, embeddings, torch.arange(length), layout, num_steps))
        kept.append(sum(saved))
        trained = [p for n, p in model.named_parameters() if n != "lm_head.weight"]
        grads.append(torch.autograd.grad(states.square().sum(), trained))
    assert all(torch.equal(one, other) for one, other in zip(*grads, strict=True))
    assert kept[1] < kept[0] / 5


def check_parity(model, lengths, num_steps, firsts=None):
    def compared(rows):
        return valid_positions(torch.ones(rows), num_steps)

    assert_parity(model, unrolled, naive_unroll, lengths, firsts, num_steps, compared)
