"""The unrolled draft model against naive sequential decoding."""

import itertools
from functools import partial

import pytest
import torch
from torch.nn.functional import pad

from drafthead.drafters.eagle3.drafter import feature_error
from tests.drafters.naive_reference import assert_parity, combine, naive_unroll
from tests.drafters.small_draft import small_model, unrolled

NORMS = [
    dict(zip(("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"), flags, strict=True))
    for flags in itertools.product((False, True), repeat=4)
]
check_parity = partial(assert_parity, ours=unrolled, naive=naive_unroll)


@pytest.mark.parametrize("norms", NORMS, ids=lambda n: "+".join(k for k, v in n.items() if v) or "none")
def test_unroll_equals_sequential_decoding_for_every_norm(norms):
    check_parity(small_model(**norms), lengths=[5, 7], num_positions=3)


@pytest.mark.parametrize("num_steps", [1, 2, 5])
@pytest.mark.parametrize(("num_aux_layers", "num_layers"), [(1, 1), (2, 2), (4, 3)])
def test_unroll_equals_sequential_decoding_for_aux_states_layers_and_steps(num_steps, num_aux_layers, num_layers):
    check_parity(small_model(num_layers, num_aux_layers), lengths=[8, 2, 4], num_positions=num_steps)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("firsts", [[5, 0, 3], [0, 1, 4]])
def test_rows_without_loss_can_be_left_out(num_layers, firsts):
    check_parity(small_model(num_layers=num_layers), lengths=[8, 3, 5], num_positions=4, firsts=firsts)


@pytest.mark.parametrize(("num_layers", "window"), [(1, 6), (3, 7)])
@pytest.mark.parametrize("firsts", [None, [9, 0, 1]])
def test_a_sliding_window_equals_sequential_decoding(num_layers, window, firsts):
    model = small_model(num_layers=num_layers, num_ttt_steps=4, sliding_window=window)
    check_parity(model, lengths=[14, 3, 9], num_positions=4, firsts=firsts)


def test_plain_rope_is_supported():
    check_parity(small_model(rope={"rope_type": "default", "rope_theta": 10000.0}), lengths=[6], num_positions=3)


def naive_errors(model, aux, embeddings, first_position, num_steps):
    """(K, T, 1) squared errors of the features that steps hand on, each divided by the square of the text's."""
    handed = naive_unroll(model, aux, embeddings, first_position, num_steps, handed_on=True)
    features = torch.stack([combine(model, one) for one in aux]).detach()
    of_text = torch.stack([pad(features[1 + k :], (0, 0, 0, min(1 + k, len(aux)))) for k in range(num_steps)])
    return ((handed - of_text).norm(dim=-1) / (of_text.norm(dim=-1) + (of_text == 0).all(-1))).square()[..., None]


@pytest.mark.parametrize("norm_output", [False, True])
@pytest.mark.parametrize("firsts", [None, [5, 0, 3]])
def test_errors_of_features_are_those_of_sequential_decoding(norm_output, firsts):
    """A step's feature stands for that of the next token; only what is handed on learns from it."""
    model = small_model(num_layers=2, feature_weight=0.5, norm_output=norm_output)
    assert_parity(
        model,
        lambda model, *arguments: torch.stack(model.unroll(*arguments)[1])[..., None],
        naive_errors,
        [8, 3, 5],
        4,
        firsts,
    )


def test_a_feature_of_zeros_has_no_error():
    """As every one has where the target's states are hidden: the control experiment."""
    state = torch.randn(2, 8, requires_grad=True)
    error = feature_error(state, torch.stack([torch.zeros(8), 2 * state.detach()[1]]))
    assert error.tolist() == pytest.approx([0, 0.25])
    (gradient,) = torch.autograd.grad(error.sum(), state)
    assert (gradient[0] == 0).all()
