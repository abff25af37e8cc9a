"""The cost model against machines whose every step time is known, and the schedule as vLLM reads it."""

import itertools

import numpy as np
import pytest

from drafthead.evaluation.decision.cost_model import SpeedPoints, SpeedSamples, fit, price
from drafthead.evaluation.decision.variants import best_schedule

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
def test_pairs_that_were_never_run_are_priced(target):
    machine = Machine(target)
    model = fit(machine.points(lengths=(1, 3, 5), noise=0.01), positions=np.diff([1.0, *LENGTHS.values()]))
    unseen = [(b, K) for b in (1, 3, 10, 40, 75, 150) for K in (2, 4)]
    errors = [model.speedup(b, K) / machine.speedup(b, K) - 1 for b, K in unseen]
    assert np.sqrt(np.mean(np.square(errors))) < 0.06
    assert max(map(abs, errors)) < 0.16  # at the ridge, where a smooth maximum rounds the corner
    assert len(model.held_out) == 6 * 4
    assert 0.005 < model.error < 0.2  # what it says of itself, at loads it was not fitted to


def test_held_out_error_is_that_of_a_fit_that_never_saw_the_load():
    points = Machine(sparse).points(lengths=(1, 3))
    points.tpot_s[(points.batch == 50) & (points.K == 3)] *= 3
    error = {(h.batch, h.K): h.error for h in fit(points).held_out}[50, 3]
    assert error == pytest.approx(2, rel=0.05)  # three times as slow as every other load says


def test_one_draft_length_prices_shorter_ones_and_says_so():
    positions = tuple(np.diff([1.0, *(LENGTHS[k] for k in (1, 2, 3))]))
    model = fit(Machine(dense).points(lengths=(3,)), positions)
    assert list(model.curve) == [1, 2, 3]
    assert model.curve[2] == pytest.approx(2.0)
    assert [name for name, value in model.coefficients.items() if value] == ["g", "v"]
    assert model.extrapolates(5, 2)
    assert not model.extrapolates(5, 3)
    assert model.extrapolates(400, 3)


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
    # Also where drafts are faster than a schedule's first pass without any, and slower than no head.
    pays = {b: max(model.speedup(b, K) for K in LENGTHS) > 1 for b in range(1, 257)}
    assert {b: model.best_draft(b) > 0 for b in pays} == pays
    assert any(not pays[b] and max(model.speedup(b, K) for K in LENGTHS) > model.speedup(b, 0) for b in pays)
    points = machine.points()
    useless = points._replace(
        length=np.ones_like(points.K), tpot_s=points.tpot_s * points.length
    )  # nothing is ever accepted
    assert {fit(useless).best_draft(b) for b in (1, 20, 256)} == {0}


def test_acceptance_comes_from_runs_first_then_from_positions():
    model = fit(Machine(dense).points(lengths=(2,)), (0.6, 0.35, 0.2))
    assert model.curve == pytest.approx({1: 1.6, 2: LENGTHS[2], 3: 2.15})


def test_schedule_drafts_less_as_batches_grow():
    model = fit(Machine(dense).points())
    schedule = best_schedule(model, 256)
    lengths = [K for _, _, K in schedule]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] >= 4
    assert lengths[-1] == min(model.lengths)  # never 0, where the drafter's first pass still runs
    assert (schedule[0][0], schedule[-1][1]) == (1, 256)


def test_intervals_of_prices_cover_pairs_that_were_never_run():
    """Noise by prompt; a third of the pairs is priced without having been run."""
    machine, rng, prompts = Machine(sparse), np.random.default_rng(1), 100
    keys = [(b, K) for b in (1, 8, 32, 128) for K in (None, 1, 3)]
    tokens = rng.integers(40, 192, prompts)
    covered = []
    for _ in range(8):
        base = np.array([machine.step(b, K) / LENGTHS.get(K, 1.0) for b, K in keys])
        samples = SpeedSamples(
            keys=np.array([(b, K, LENGTHS.get(K, 1.0)) for b, K in keys], float).T,
            decode_s=base[:, None] * tokens * rng.lognormal(0, 0.15, (len(keys), prompts)),
            tokens=np.tile(tokens, (len(keys), 1)).astype(float),
            positions=tuple(np.diff([1.0, *(LENGTHS[k] for k in (1, 2, 3))])),
        )
        priced = price(samples, (4, 16, 64), 128)
        covered += [s.low <= machine.speedup(*pair) <= s.high for pair, s in priced.speedups.items()]
    assert np.mean(covered) >= 0.9
