"""A head that starts from its target's lm_head and final norm learns faster than one that starts at random."""

import pytest
import torch

from drafthead.data.packing import cut, pack, plan_epoch
from drafthead.drafters.base import draft_shape
from drafthead.drafters.registry import drafter_of
from drafthead.target.pieces import frozen_target, load_pieces
from drafthead.training.inputs import draft_vocabulary, open_inputs, survey
from drafthead.training.trainer import LossModule

pytestmark = pytest.mark.slow

STEPS, BUDGET, MAX_STEPS = 2, 1024, 60
HELD_OUT_LOSS = 3.0  # nats per position of the first TTT step


def loss_of(objective, batch, target):
    """Weighted loss per position and the plain loss of the first TTT step."""
    counts = batch.scored.sum(1).clamp_min(1)
    scored = objective(batch, target, (0.8 ** torch.arange(STEPS) / counts).float())
    return scored.loss, float(scored.position_sums[0] / counts[0])


@pytest.fixture(scope="module")
def steps_to_reach(tiny_run):
    """Optimiser steps until the held-out loss is reached, by seed and start; as many as are tried where it is not."""
    inputs = open_inputs(tiny_run)
    drafter = drafter_of(tiny_run.head.model_copy(update={"num_ttt_steps": STEPS}))
    found = survey(inputs.train, inputs.spec.vocab_size, BUDGET, drafter)
    vocabulary, pieces = draft_vocabulary(tiny_run, found), load_pieces(tiny_run.target_path)
    target = frozen_target(pieces, inputs.spec, vocabulary.target_ids, torch.device("cpu"), torch.float32)
    shape = draft_shape(tiny_run.head, inputs.spec, tiny_run.target.aux_layer_ids)
    held_out = [cut(i, inputs.validation.tokens(i)[1], BUDGET, drafter) for i in range(8)]
    held_out = pack(inputs.validation, [w for windows in held_out for w in windows], drafter).to("cpu", torch.float32)

    def run(seed: int, from_target: bool, most: int = MAX_STEPS) -> int:
        model = drafter.from_target(shape, pieces, vocabulary, seed)
        if not from_target:
            model.lm_head.reset_parameters()
            torch.nn.init.ones_(model.norm.weight)
        objective = LossModule(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        for step, windows in enumerate(plan_epoch(found.windows, BUDGET, seed, 0)[:most]):
            with torch.no_grad():
                if loss_of(objective, held_out, target)[1] <= HELD_OUT_LOSS:
                    return step
            batch = pack(inputs.train, windows, drafter).to("cpu", torch.float32)
            loss_of(objective, batch, target)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        return most

    return run


def test_the_targets_rows_reach_a_held_out_loss_in_fewer_steps(steps_to_reach):
    from_target = steps_to_reach(0, True)
    assert from_target < MAX_STEPS
    assert steps_to_reach(0, False, from_target + 1) == from_target + 1
