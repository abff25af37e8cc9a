"""A machine whose step times are known: what a cost model has to find out."""

import itertools

import numpy as np

from drafthead.evaluation.decision.cost_model import SpeedPoint

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

    def points(self, lengths=tuple(LENGTHS), loads=LOADS, noise: float = 0.0) -> list[SpeedPoint]:
        rng = np.random.default_rng(0)
        plain = [SpeedPoint(b, None, self.step(b, None) * rng.lognormal(0, noise)) for b in loads]
        drafted = [
            SpeedPoint(b, K, self.step(b, K) / LENGTHS[K] * rng.lognormal(0, noise), LENGTHS[K])
            for b, K in itertools.product(loads, lengths)
        ]
        return plain + drafted
