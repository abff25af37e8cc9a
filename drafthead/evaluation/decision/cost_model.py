"""The model that fills in a schedule of draft lengths: speedup(b, K) = AL(K) / r(b, K).

AL(K) is the acceptance length, which hardly depends on the load, and r(b, K) the time of a speculative step over
that of a plain step with the same b requests in the batch. Measured at some loads, they price every load between.
Decode only: the wait for the first token is not in it.

A speculative step costs what a plain one does, the drafter's passes, and K more tokens per request to verify:

    s(b, K) = base(b) + d0 + d1 · b + K · g + v · (W(b (K + 1)) - W(b)),    all coefficients >= 0

base(b) is interpolated between measured loads. W(n) is the target's work on n tokens, up to a factor: flat until
arithmetic outlasts the reading of weights and then linear (a ridge at n0 tokens), or a power of n below 1 where more
tokens share experts. The runs choose the shape. What this gives up is everything finer: a schedule is proposed by the
model and judged by serving it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import make_interp_spline
from scipy.optimize import nnls

from drafthead.evaluation.results.levels import ServingRows
from drafthead.evaluation.workload import BASELINE
from drafthead.statistics import Array


class SpeedPoints(NamedTuple):
    """Decoding speed at loads and draft lengths, each (N,).

    Attributes:
        batch: requests in flight, at most the engine's max_num_seqs.
        K: draft tokens; NaN without a drafter, 0 where the drafter runs and proposes nothing.
        length: acceptance length there; 1 without drafts.
        tpot_s: seconds per output token after the first.
    """

    batch: Array
    K: Array
    length: Array
    tpot_s: Array

    def where(self, kept: NDArray[np.bool_]) -> "SpeedPoints":
        """Some of them."""
        return SpeedPoints(*(values[kept] for values in self))


def speed_points(rows: ServingRows, method: str, max_batch: int) -> SpeedPoints:
    """What the cost model needs of the baseline and one method, blocks pooled.

    Args:
        rows: of one workload, under loads without a request rate.
        method: name of the method that drafts.
        max_batch: the engine's max_num_seqs: more requests in flight wait and are not in the batch.
    """
    requests, runs = (frame[frame["method"].isin((BASELINE, method))] for frame in rows)
    good = requests[(requests["error"] == "") & (requests["output_tokens"] > 1)]
    good = good.assign(decode_s=good["e2e_s"] - good["ttft_s"], tokens=good["output_tokens"] - 1)
    levels = ["method", "k", "load"]
    spent = good.groupby(levels)[["decode_s", "tokens"]].sum()
    # What was asked for, where it was reached: a batch that differs by noise is no other load.
    runs = runs.assign(batch=runs["running"].where(~runs["reached"].astype(bool), runs["concurrency"]))
    pooled = runs.groupby(levels).agg({"batch": "mean", "drafts": "sum", "accepted": "sum"}).loc[spent.index]
    k = pooled.index.get_level_values("k").to_numpy(float, copy=True)
    k[pooled.index.get_level_values("method") == BASELINE] = np.nan
    length = (1.0 + pooled["accepted"] / pooled["drafts"]).fillna(1.0)  # 1 without drafts
    values = pooled["batch"].clip(upper=max_batch), k, length, spent["decode_s"] / spent["tokens"]
    return SpeedPoints(*(np.asarray(value, float) for value in values))


@dataclass(frozen=True)
class Work:
    """W(n): what n tokens in one step cost the target, up to a factor.

    Attributes:
        power: n^power, when there is no ridge.
        ridge: n0; a smooth maximum of n0 and n.
    """

    power: float = 1.0
    ridge: float | None = None

    def __call__(self, tokens: ArrayLike) -> Array:
        n = np.asarray(tokens, float)
        return n**self.power if self.ridge is None else (self.ridge**4 + n**4) ** 0.25


@dataclass(frozen=True)
class CostModel:
    """A fitted model of one drafter on one machine.

    Attributes:
        base: batch -> seconds of a plain step.
        coefficients: d0, d1, g, v in seconds; 0 for one that the runs cannot tell.
        work: W.
        curve: K -> AL(K) of the draft lengths that were run, ascending.
    """

    base: Callable[[ArrayLike], Array]
    coefficients: dict[str, float]
    work: Work
    curve: dict[int, float]

    def step_ratio(self, batch: ArrayLike, K: ArrayLike) -> Any:
        """r(b, K) of one pair or of many: the acceptance length at which drafting neither pays nor costs."""
        extra = sum(self.coefficients[name] * value for name, value in terms_of(self.work, batch, K).items())
        return 1.0 + extra / self.base(batch)

    def speedup(self, batch: float, K: int) -> float:
        """Tokens per second while decoding, relative to no speculation."""
        return float(self.curve[K] / self.step_ratio(batch, K))


def terms_of(work: Work, batch: ArrayLike, K: ArrayLike) -> dict[str, Array]:
    """What each coefficient multiplies; of those that the runs cannot tell apart the first is fitted."""
    batch, K = np.asarray(batch, float), np.asarray(K, float)
    return {"g": K, "v": work(batch * (K + 1)) - work(batch), "d0": np.ones_like(K), "d1": batch}


def _plain_steps(batch: Array, step_s: Array) -> Callable[[ArrayLike], Array]:
    """base(b): linear between measured loads and beyond them, constant where there is one."""
    loads, index = np.unique(batch, return_inverse=True)
    mean = np.bincount(index, step_s) / np.bincount(index)
    if len(loads) == 1:
        return lambda at: np.full_like(np.asarray(at, float), mean[0])
    line = make_interp_spline(loads, mean, k=1)
    # Never below the shortest step seen: a line through two noisy points may fall.
    return lambda at: np.maximum(line(at), mean.min())


_POWERS = (1.0, 0.75, 0.5)
_RIDGES = 12


def fit(points: SpeedPoints) -> CostModel:
    """Fit the model.

    Args:
        points: plain steps and drafted ones; several of one (batch, K) are averaged by the fit.

    Raises:
        ValueError: there is no plain or no drafted step.
    """
    plain = np.isnan(points.K)
    if plain.all() or not plain.any():
        raise ValueError(
            f"the cost model needs runs without and with drafts, found {plain.sum()} and {(~plain).sum()}; "
            "run: python eval/serving.py RECIPE"
        )
    seconds = points.tpot_s * points.length  # per step of the target
    base = _plain_steps(points.batch[plain], seconds[plain])
    (batch, K, length, _), step = points.where(~plain), seconds[~plain]
    extra = step - base(batch)
    fits = [(*_least_squares(batch, K, extra, step, work), work) for work in _shapes(batch, K)]
    # The first of those that fit about as well: the plain ones come first.
    closest = min(residual for _, residual, _ in fits)
    coefficients, _, work = next(found for found in fits if found[1] <= 1.02 * closest + 1e-12)
    return CostModel(base, coefficients, work, {k: float(np.mean(length[k == K])) for k in sorted({int(k) for k in K})})


def _shapes(batch: Array, K: Array) -> list[Work]:
    """Shapes of W that the runs can tell apart: linear only, unless there are three loads and five pairs."""
    if len(set(batch)) < 3 or len(set(zip(batch, K, strict=True))) < 5:
        return [Work()]
    tokens = batch * (K + 1)
    ridges = np.geomspace(tokens.min(), tokens.max(), _RIDGES + 2)[1:-1]
    return [*(Work(power) for power in _POWERS), *(Work(ridge=float(n)) for n in ridges)]


def _least_squares(batch: Array, K: Array, extra: Array, step: Array, work: Work) -> tuple[dict[str, float], float]:
    """Non-negative least squares on errors relative to the step; coefficients and residual."""
    terms = terms_of(work, batch, K)
    # With one draft length, what a first pass costs cannot be told from what every token costs.
    used = [name for name in (terms if len(set(K)) > 1 else ("g", "v")) if terms[name].any()]
    matrix = np.stack([terms[name] / step for name in used], axis=1)
    norms = np.linalg.norm(matrix, axis=0)
    solution, residual = nnls(matrix / norms, extra / step)
    coefficients = dict.fromkeys(terms, 0.0) | dict(zip(used, map(float, solution / norms), strict=True))
    return coefficients, float(residual)
