"""What ranks wait for one another: the cost of the micro batches that they compute side by side."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafthead.data.packing import Window, cost, leveled, plan_epoch

BUDGET, RANKS = 16_384, 8
# Typical tokens of a prompt and of a response, and the spread of their logarithms.
MIXES = {"chat": (300, 1.0, 500, 0.8), "long prompts": (3000, 0.7, 400, 0.8), "reasoning": (300, 1.0, 2000, 0.7)}


def drawn(mix: str, count: int) -> list[Window]:
    generator, (prompt, prompt_spread, response, response_spread) = np.random.default_rng(0), MIXES[mix]
    prompts = np.minimum(generator.lognormal(np.log(prompt), prompt_spread, count), 12_000).astype(int) + 20
    responses = np.minimum(generator.lognormal(np.log(response), response_spread, count), 4_000).astype(int) + 2
    pairs = enumerate(zip(prompts.tolist(), responses.tolist(), strict=True))
    return [Window(i, 0, p + r, p - 2, p + r, (r,)) for i, (p, r) in pairs]


def imbalance(batches: list[list[Window]], first: int = 0) -> float:
    """The slowest rank's time over the mean one's, over all steps of one micro batch a rank."""
    steps = [batches[i : i + RANKS] for i in range(first, len(batches) - RANKS + 1, RANKS)]
    return float(np.mean([max(map(cost, step)) * RANKS / sum(map(cost, step)) for step in steps]))


@pytest.mark.parametrize("mix", MIXES)
def test_ranks_have_the_same_to_do(mix):
    plan = plan_epoch(drawn(mix, 8_000), BUDGET, 0, 0)
    assert imbalance(plan) > 1.05, "nothing to level"
    assert imbalance(leveled(plan, RANKS, 0, seed=0)) <= 1.05


@given(st.integers(0, 300), st.integers(1, 5), st.integers(0, 4), st.integers(0, 3))
def test_every_batch_stays_and_steps_cut_by_a_group_are_left_alone(count, per_step, first, seed):
    first %= per_step
    batches = [[Window(i, 0, 10, i % 7, 10, (1,))] for i in range(count)]
    found = leveled(batches, per_step, first, seed)
    assert sorted(batch[0].document for batch in found) == list(range(count))
    assert found[:first] == batches[:first]
    if per_step == 1:
        assert found == batches
    assert leveled(batches, per_step, first, seed) == found
