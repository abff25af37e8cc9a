"""Fitting the cost model to runs, and to resamplings of their prompts; every pair is predicted by a fit without it."""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import numpy as np
from scipy.optimize import nnls

from drafthead.evaluation.decision.cost_model import CostModel, HeldOut, Work, interpolated, terms_of
from drafthead.evaluation.decision.speed import AcceptanceCurve, SpeedPoint
from drafthead.statistics import Array

_POWERS = (1.0, 0.75, 0.5)
_RIDGES = 12
# A term joins when it adds rank, in this order.
_TERMS = ("g", "v", "d0", "d1")


def fit(points: Sequence[SpeedPoint], positions: Sequence[float] = ()) -> CostModel:
    """Fit the model and predict every pair that can be left out.

    Args:
        points: plain steps (K None) and drafted ones; several of one (batch, K) are averaged by the fit.
        positions: joint prefix acceptance at the largest K, for draft lengths that were not run.

    Raises:
        ValueError: there is no plain or no drafted step.
    """
    baseline, drafted = _split(points)
    model = _fit(baseline, drafted, tuple(positions))
    pairs = sorted({(p.batch, p.K) for p in drafted if p.K})
    found = [_predict_left_out(model, baseline, drafted, pair) for pair in pairs]
    return replace(model, held_out=tuple(h for h in found if h is not None))


def refit(model: CostModel, points: Sequence[SpeedPoint]) -> CostModel:
    """The same shape and acceptance fitted to resampled points, without leaving anything out."""
    baseline, drafted = _split(points)
    return replace(_fit(baseline, drafted, model.curve.positions, model.work), curve=model.curve)


def _split(points: Sequence[SpeedPoint]) -> tuple[tuple[SpeedPoint, ...], list[SpeedPoint]]:
    baseline = tuple(sorted((p for p in points if p.K is None), key=lambda p: p.batch))
    drafted = [p for p in points if p.K is not None]
    if not baseline or not drafted:
        raise ValueError(
            f"the cost model needs runs without and with drafts, found {len(baseline)} and {len(drafted)}; "
            "run: python eval/serving.py RECIPE"
        )
    return baseline, drafted


def _predict_left_out(
    model: CostModel, baseline: tuple[SpeedPoint, ...], drafted: Sequence[SpeedPoint], pair: tuple[float, int]
) -> HeldOut | None:
    """One pair, by a fit without it; None where what is left knows too little of it to carry the same model."""
    batch, K = pair
    inside = [p for p in drafted if (p.batch, p.K) != pair]
    outside = [p for p in drafted if (p.batch, p.K) == pair]
    if not any(p.K for p in inside):
        return None
    positions = model.curve.positions
    without = _fit(baseline, inside, positions)
    # The positions of the longest draft come from its own runs.
    of_itself = len(positions) == K and K not in without.curve.measured
    if of_itself or K not in without.curve.known or set(without.terms) != set(model.terms):
        return None
    measured = without.base_step_s(batch) / float(np.mean([p.tpot_s for p in outside]))
    return HeldOut(batch, K, measured, without.speedup(batch, K))


def _fit(
    baseline: tuple[SpeedPoint, ...],
    drafted: Sequence[SpeedPoint],
    positions: tuple[float, ...],
    work: Work | None = None,
) -> CostModel:
    batch = np.array([p.batch for p in drafted])
    K = np.array([p.K for p in drafted], float)
    step = np.array([p.step_s for p in drafted])
    extra = step - interpolated([p.batch for p in baseline], [p.step_s for p in baseline], batch)
    shapes = [work] if work else _shapes(batch, K)
    fits = [(*_least_squares(batch, K, extra, step, shape), shape) for shape in shapes]
    # The first of those that fit about as well: the plain ones come first.
    closest = min(residual for _, residual, _, _ in fits)
    coefficients, _, terms, work = next(found for found in fits if found[1] <= 1.02 * closest + 1e-12)
    lengths = {int(k): float(np.mean([p.length for p in drafted if k == p.K])) for k in sorted(set(K)) if k > 0}
    return CostModel(
        baseline, coefficients, work, AcceptanceCurve(lengths, positions), terms,
        (float(batch.min()), float(batch.max())), tuple(sorted({int(k) for k in K})),
    )  # fmt: skip


def _shapes(batch: Array, K: Array) -> list[Work]:
    """Shapes of W that the runs can tell apart: linear only, unless there are three loads and five pairs."""
    if len(set(batch)) < 3 or len(set(zip(batch, K, strict=True))) < 5:
        return [Work()]
    tokens = batch * (K + 1)
    ridges = np.geomspace(tokens.min(), tokens.max(), _RIDGES + 2)[1:-1]
    return [*(Work(power) for power in _POWERS), *(Work(ridge=float(n)) for n in ridges)]


def _least_squares(
    batch: Array, K: Array, extra: Array, step: Array, work: Work
) -> tuple[dict[str, float], float, tuple[str, ...]]:
    """Non-negative least squares on errors relative to the step; coefficients, residual, and the terms used."""
    used = _identified(work, tuple(batch), tuple(K))
    columns = terms_of(work, batch, K)
    matrix = np.stack([columns[name] / step for name in used], axis=1)
    norms = np.linalg.norm(matrix, axis=0)
    solution, residual = nnls(matrix / norms, extra / step)
    coefficients = dict.fromkeys(_TERMS, 0.0) | dict(zip(used, map(float, solution / norms), strict=True))
    return coefficients, float(residual), used


@lru_cache(maxsize=1024)
def _identified(work: Work, batch: tuple[float, ...], K: tuple[float, ...]) -> tuple[str, ...]:
    """The terms that these pairs can tell apart."""
    columns = terms_of(work, batch, K)
    used: list[str] = []
    # With one draft length, what a first pass costs cannot be told from what every token costs.
    for term in _TERMS if len(set(K)) > 1 else _TERMS[:2]:
        matrix = np.stack([columns[name] for name in (*used, term)], axis=1)
        norms = np.linalg.norm(matrix, axis=0)
        if norms.all() and np.linalg.matrix_rank(matrix / norms, tol=1e-6) > len(used):
            used.append(term)
    return tuple(used)
