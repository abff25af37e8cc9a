"""The cost model against machines whose every step time is known, and the schedule as vLLM reads it."""

import itertools

import numpy as np
import pytest

from drafthead.config.evaluation import HEAD
from drafthead.evaluation.decision.cost_model import SpeedPoints, fit, speed_points
from drafthead.evaluation.decision.variants import best_schedule
from drafthead.evaluation.results.levels import steady
from tests.evaluation.rows import served
from tests.recipes import tiny_recipe

LENGTHS = {1: 1.60, 2: 2.00, 3: 2.25, 4: 2.40, 5: 2.50}
LOADS = (1, 5, 25, 50, 100, 200)


def dense(tokens: float) -> float:
    """Milliseconds of a target that reads its weights in 10 ms and computes 17 tokens per ms."""
    return max(10.0, 0.06 * tokens)


def sparse(tokens: float) -> float:
    """A mixture of experts: more tokens wake more experts, ever fewer of them new."""
    return 10 + 0.5 * tokens**0.6


class Machine:
    """Step times of a target and its drafter, in ms."""

    def __init__(self, target):
        self.target = target

    def step(self, batch: float, K: int | None) -> float:
        plain = self.target(batch) + 0.004 * batch
        if K is None:
            return plain
        return self.target(batch * (K + 1)) + 0.004 * batch + 0.25 + K * (0.3 + 0.0006 * batch)

    def speedup(self, batch: float, K: int) -> float:
        return LENGTHS[K] * self.step(batch, None) / self.step(batch, K)

    def points(self, lengths=tuple(LENGTHS), loads=LOADS, noise: float = 0.0) -> SpeedPoints:
        rng = np.random.default_rng(0)
        pairs = [*itertools.product(loads, [None]), *itertools.product(loads, lengths)]
        length = np.array([LENGTHS.get(K, 1.0) for _, K in pairs])
        step = np.array([self.step(*pair) * rng.lognormal(0, noise) for pair in pairs])
        return SpeedPoints(*np.array(pairs, float).T, length, step / length)


@pytest.mark.parametrize("target", [dense, sparse])
def test_loads_that_were_never_run_are_priced(target):
    machine = Machine(target)
    model = fit(machine.points(noise=0.01))
    unseen = [(b, K) for b in (1, 3, 10, 40, 75, 150) for K in LENGTHS]
    errors = [model.speedup(b, K) / machine.speedup(b, K) - 1 for b, K in unseen]
    assert np.sqrt(np.mean(np.square(errors))) < 0.06
    assert max(map(abs, errors)) < 0.16  # at the ridge, where a smooth maximum rounds the corner


def test_step_times_are_those_of_the_rows(tmp_path):
    """Made with r(c, 3) = 2.4 / speed."""
    rows = served(tiny_recipe(tmp_path), head_speed={1: 1.5, 64: 1.2, 90: 0.8}, lengths=(1, 3))
    model = fit(speed_points(steady(rows), HEAD, 90))
    assert model.step_ratio([1, 64, 90], 3) == pytest.approx([1.6, 2.0, 3.0], rel=0.05)


def test_with_one_draft_length_the_first_pass_is_not_told_from_the_others():
    model = fit(Machine(dense).points(lengths=(3,)))
    assert model.curve == pytest.approx({3: LENGTHS[3]})
    assert [name for name, value in model.coefficients.items() if value] == ["g", "v"]


def test_runs_that_cannot_carry_a_model_are_named():
    points = Machine(dense).points()
    with pytest.raises(ValueError, match="0 and 30.*python eval"):
        fit(points.where(~np.isnan(points.K)))


def test_the_load_where_drafting_stops_paying_is_found():
    machine = Machine(dense)
    model = fit(machine.points())
    assert model.step_ratio(1, 3) == pytest.approx(machine.step(1, 3) / machine.step(1, None), rel=0.04)
    load = max(b for b in range(1, 257) if model.speedup(b, 3) > 1)
    assert machine.speedup(0.85 * load, 3) > 1 > machine.speedup(1.15 * load, 3)


def test_schedule_drafts_less_as_batches_grow():
    model = fit(Machine(dense).points())
    schedule = best_schedule(model, 256)
    lengths = [K for _, _, K in schedule]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= 4
    assert lengths[-1] == min(model.curve)  # never 0, where the drafter's first pass still runs
    assert (schedule[0][0], schedule[-1][1]) == (1, 256)
