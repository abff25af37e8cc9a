"""A head that starts from its target's lm_head and final norm learns faster than one that starts at random."""

import pytest
import torch

from drafthead.data.packing import pack, plan_epoch
from drafthead.data.windows import cut
from drafthead.drafters.eagle3.alignment import valid_positions
from drafthead.drafters.eagle3.model import draft_shape
from drafthead.target.pieces import load_pieces
from drafthead.training.objective import TTTObjective, score, step_weights
from drafthead.training.setup import build_model, draft_vocabulary, frozen_target, open_inputs, survey

pytestmark = pytest.mark.slow

STEPS, BUDGET, MAX_STEPS = 2, 1024, 60
HELD_OUT_LOSS = 3.0  # nats per position of the first TTT step


def loss_of(objective, batch, target):
    """Weighted loss per position and the plain loss of the first TTT step."""
    valid = valid_positions(batch.loss_mask, batch.layout.cu_rows, STEPS) & batch.counted
    counts = valid.sum(1).clamp_min(1)
    scored = score(objective, batch, target, valid, (step_weights(STEPS, 0.8) / counts).float())
    return scored.loss, float(scored.position_sums[0] / counts[0])


@pytest.fixture(scope="module")
def steps_to_reach(tiny_run):
    """Optimiser steps until the held-out loss is reached, by seed and start."""
    inputs = open_inputs(tiny_run)
    found = survey(inputs.train, inputs.spec.vocab_size, BUDGET, STEPS)
    vocabulary, pieces = draft_vocabulary(tiny_run, found), load_pieces(tiny_run.target_path)
    target = frozen_target(pieces, inputs.spec, vocabulary, torch.device("cpu"), torch.float32)
    held_out = [cut(i, inputs.validation.tokens(i)[1], BUDGET, STEPS) for i in range(8)]
    held_out = pack(inputs.validation, [w for windows in held_out for w in windows]).to("cpu", torch.float32)

    def run(seed: int, from_target: bool) -> int:
        model = build_model(draft_shape(tiny_run, inputs.spec), pieces, vocabulary, seed)
        if not from_target:
            model.lm_head.reset_parameters()
            torch.nn.init.ones_(model.norm.weight)
        objective = TTTObjective(model, STEPS)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
        for step, windows in enumerate(plan_epoch(found.windows, BUDGET, seed, 0)[:MAX_STEPS]):
            with torch.no_grad():
                if loss_of(objective, held_out, target)[1] <= HELD_OUT_LOSS:
                    return step
            batch = pack(inputs.train, windows).to("cpu", torch.float32)
            loss_of(objective, batch, target)[0].backward()
            optimizer.step()
            optimizer.zero_grad()
        return MAX_STEPS

    return run


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_targets_rows_reach_a_held_out_loss_in_fewer_steps(steps_to_reach, seed):
    from_target, at_random = steps_to_reach(seed, True), steps_to_reach(seed, False)
    print(f"seed {seed}: {from_target} steps from the target, {at_random} at random")
    assert from_target < at_random
