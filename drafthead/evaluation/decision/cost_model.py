"""The model that prices any draft length at any load: speedup(b, K) = AL(K) / r(b, K).

AL(K) is the acceptance length, which hardly depends on the load, and r(b, K) the time of a speculative step over
that of a plain step with the same b requests in the batch. Measured once each, they price every pair, run or not.
Decode only: the wait for the first token is not in it.

A speculative step costs what a plain one does, the drafter's passes, and K more tokens per request to verify:

    s(b, K) = base(b) + d0 + d1 · b + K · g + v · (W(b (K + 1)) - W(b)),    all coefficients >= 0

base(b) is interpolated between measured loads. W(n) is the target's work on n tokens, up to a factor: flat until
arithmetic outlasts the reading of weights and then linear (a ridge at n0 tokens), or a power of n below 1 where more
tokens share experts. The runs choose the shape. What this gives up is everything finer; what that costs is seen by
leaving one load after the other out of the fit, baseline included, and predicting it. A price's interval holds that
error and what resampling prompts does to the fit, added in quadrature on the scale of logarithms.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.interpolate import make_interp_spline
from scipy.optimize import nnls

from drafthead.evaluation.results.levels import ServingRows
from drafthead.evaluation.results.summary import counted
from drafthead.evaluation.workload import BASELINE
from drafthead.statistics import CONFIDENCE, Array, Interval, stratified_draws

# What is fitted: speed and acceptance at every load and draft length that was run.


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


class SpeedSamples(NamedTuple):
    """Decoding times by prompt, so that prompts can be resampled.

    Attributes:
        keys: (3, N) batch, K and length as in SpeedPoints, one column per load and method.
        decode_s, tokens: (N, P) seconds after the first token, and tokens after it, of every prompt; 0 for a prompt
            that a level did not send.
        positions: joint prefix acceptance at the largest K.
    """

    keys: Array
    decode_s: Array
    tokens: Array
    positions: Sequence[float]

    def points(self, drawn: Array | None = None) -> SpeedPoints:
        """The points over all prompts, or over a resampling of them, given as (P,) how often each is drawn."""
        times = np.ones(self.tokens.shape[1]) if drawn is None else drawn
        batch, K, length = self.keys
        return SpeedPoints(batch, K, length, (self.decode_s @ times) / (self.tokens @ times))


def decoded(requests: pd.DataFrame) -> pd.DataFrame:
    """Those that have tokens after the first, which is what the model prices."""
    return requests[(requests["error"] == "") & (requests["output_tokens"] > 1)]


def speed_samples(rows: ServingRows, method: str, max_batch: int) -> SpeedSamples:
    """What the cost model needs of the baseline and one method, blocks pooled.

    Args:
        rows: of one workload, under loads without a request rate.
        method: name of the method that drafts.
        max_batch: the engine's max_num_seqs: more requests in flight wait and are not in the batch.
    """
    requests, runs = (frame[frame["method"].isin((BASELINE, method))] for frame in rows)
    good = decoded(requests)
    good = good.assign(decode_s=good["e2e_s"] - good["ttft_s"], tokens=good["output_tokens"] - 1)
    levels = ["method", "k", "load"]
    seconds, tokens = (
        good.pivot_table(index=levels, columns="prompt_id", values=value, aggfunc="sum", fill_value=0.0)
        for value in ("decode_s", "tokens")
    )
    # What was asked for, where it was reached: a batch that differs by noise is no other load.
    runs = runs.assign(batch=runs["running"].where(~runs["reached"].astype(bool), runs["concurrency"]))
    pooled = runs.groupby(levels).agg({"batch": "mean", "drafts": "sum", "accepted": "sum"}).loc[seconds.index]
    k = pooled.index.get_level_values("k").to_numpy(float, copy=True)
    k[pooled.index.get_level_values("method") == BASELINE] = np.nan
    length = (1.0 + pooled["accepted"] / pooled["drafts"]).fillna(1.0)  # 1 without drafts
    keys = np.array([pooled["batch"].clip(upper=max_batch), k, length])
    K = int(runs["k"].max())
    longest = runs[(runs["method"] == method) & (runs["k"] == K) & (runs["drafts"] > 0)]
    positions = counted(longest, K)[1].tolist() if len(longest) else []
    return SpeedSamples(keys, seconds.to_numpy(float), tokens.to_numpy(float), positions)


# The model.


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

    def __str__(self) -> str:
        if self.ridge is not None:
            return f"flat up to about {self.ridge:.0f} tokens per step, then linear"
        return "linear in tokens" if self.power == 1 else f"tokens to the power {self.power:g}"


class HeldOut(NamedTuple):
    """Decoding speed at a load, predicted from the other loads alone; tokens per second of one request.

    Attributes:
        batch, K: which; K is None for the baseline.
        measured, predicted: speed.
        inside: the load lies between others; beyond them it is an extrapolation.
    """

    batch: float
    K: int | None
    measured: float
    predicted: float
    inside: bool

    @property
    def error(self) -> float:
        """predicted / measured - 1."""
        return self.predicted / self.measured - 1


@dataclass(frozen=True)
class CostModel:
    """A fitted model of one drafter on one machine.

    Attributes:
        base: batch -> seconds of a plain step.
        coefficients: d0, d1, g, v in seconds; 0 for one that the runs cannot tell.
        work: W.
        curve: K -> AL(K), ascending, of the draft lengths that can be priced: as measured where K was run, else from
            the positions of the longest draft. Acceptance beyond that was never seen.
        batches, lengths: range of what was run with drafts.
        max_batch: the engine's max_num_seqs: of more requests in flight only so many are in a batch, the others wait.
        held_out: the baseline and every draft length at every load that could be left out.
    """

    base: Callable[[ArrayLike], Array]
    coefficients: dict[str, float]
    work: Work
    curve: dict[int, float]
    batches: tuple[float, float]
    lengths: tuple[int, ...]
    max_batch: float
    held_out: tuple[HeldOut, ...] = ()

    def step_ratio(self, batch: ArrayLike, K: ArrayLike) -> Any:
        """r(b, K) of one pair or of many, which is also the acceptance length at which drafting neither pays nor costs.

        Above K + 1 no head can pay. At K = 0 the drafter's first pass still runs.
        """
        batch = np.minimum(batch, self.max_batch)
        extra = sum(self.coefficients[name] * value for name, value in terms_of(self.work, batch, K).items())
        return 1.0 + extra / self.base(batch)

    def speedup(self, batch: float, K: int) -> float:
        """Tokens per second while decoding, relative to no speculation."""
        return float((self.curve[K] if K else 1.0) / self.step_ratio(batch, K))

    def best_draft(self, batch: float) -> int:
        """The draft length that decodes fastest, of all whose acceptance is known; 0 where none beats no head."""
        best = max(self.curve, key=lambda K: (self.speedup(batch, K), -K))
        return best if self.speedup(batch, best) > 1 else 0

    def extrapolates(self, batch: float, K: int) -> bool:
        """Whether the pair lies outside what was run."""
        least, most = self.batches
        return not (least <= min(batch, self.max_batch) <= most and min(self.lengths) <= K <= max(self.lengths))

    @property
    def inside(self) -> list[HeldOut]:
        """Drafts at loads between others."""
        return [h for h in self.held_out if h.inside and h.K is not None]

    @property
    def error(self) -> float | None:
        """Root mean square of log(predicted / measured), of drafts at loads between others; None: no such."""
        logs = [np.log(h.predicted / h.measured) for h in self.inside]
        return float(np.sqrt(np.mean(np.square(logs)))) if logs else None


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


# Fitting the model to runs, and to resamplings of their prompts.


_POWERS = (1.0, 0.75, 0.5)
_RIDGES = 12


def fit(points: SpeedPoints, positions: Sequence[float] = (), max_batch: float = np.inf) -> CostModel:
    """Fit the model, and predict every load by a fit without it.

    Args:
        points: plain steps and drafted ones; several of one (batch, K) are averaged by the fit.
        positions: joint prefix acceptance at the largest K, for draft lengths that were not run.
        max_batch: the engine's max_num_seqs.

    Raises:
        ValueError: there is no plain or no drafted step.
    """
    model = _fit(points, positions, max_batch)
    loads = np.unique(points.batch[np.isnan(points.K)])
    return replace(model, held_out=tuple(h for batch in loads for h in _leave_out(points, positions, batch)))


def _leave_out(points: SpeedPoints, positions: Sequence[float], batch: float) -> Iterator[HeldOut]:
    """The baseline and every draft length at a load; nothing where fewer than two other loads are left."""
    at, others = points.where(points.batch == batch), points.where(points.batch != batch)
    plain = np.isnan(others.K)
    loads = {*others.batch[plain]} & {*others.batch[~plain]}
    if len(loads) < 2:
        return
    model = _fit(others, positions)
    inside = min(loads) < batch < max(loads)
    for K in (None, *np.unique(at.K[~np.isnan(at.K)]).astype(int).tolist()):
        if not K or K in model.curve:
            measured = 1 / float(at.tpot_s[np.isnan(at.K) if K is None else at.K == K].mean())
            predicted = (1.0 if K is None else model.speedup(batch, K)) / float(model.base(batch))
            yield HeldOut(batch, K, measured, predicted, inside)


def _fit(
    points: SpeedPoints, positions: Sequence[float], max_batch: float = np.inf, work: Work | None = None
) -> CostModel:
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
    fits = [(*_least_squares(batch, K, extra, step, w), w) for w in ([work] if work else _shapes(batch, K))]
    # The first of those that fit about as well: the plain ones come first.
    closest = min(residual for _, residual, _ in fits)
    coefficients, _, work = next(found for found in fits if found[1] <= 1.02 * closest + 1e-12)
    lengths = tuple(sorted({int(k) for k in K}))
    curve = {k: 1.0 + sum(positions[:k]) for k in range(1, len(positions) + 1)}
    curve |= {k: float(np.mean(length[k == K])) for k in lengths if k > 0}
    batches = float(batch.min()), float(batch.max())
    return CostModel(base, coefficients, work, dict(sorted(curve.items())), batches, lengths, max_batch)


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


# Prices of every load and draft length, run or not.

_RESAMPLES = 200  # of whole fits


class Priced(NamedTuple):
    """The cost model of a method, and what it says of decoding at loads and draft lengths, run or not.

    Attributes:
        speedups: (concurrency, K) -> speed relative to no speculation.
    """

    model: CostModel
    speedups: dict[tuple[int, int], Interval]


def price(samples: SpeedSamples, concurrency: Sequence[int], max_batch: int) -> Priced:
    """Fit the cost model and price every load at every draft length whose acceptance is known.

    Args:
        samples: decoding times by prompt.
        concurrency: loads to price, run or not.
        max_batch: the engine's max_num_seqs; a load above it decodes as that batch.

    Raises:
        ValueError: there are no runs without or none with drafts.
    """
    model = fit(samples.points(), samples.positions, max_batch)
    pairs = [(c, K) for c in concurrency for K in model.curve]
    lengths = np.log([model.curve[K] for _, K in pairs])
    draws = stratified_draws(samples.tokens > 0, _RESAMPLES, np.random.default_rng(0))
    fits = [_fit(samples.points(drawn), samples.positions, max_batch, model.work) for drawn in draws]
    value, *logs = (lengths - np.log(one.step_ratio(*np.transpose(pairs))) for one in (model, *fits))  # each (pairs,)
    low, high = np.quantile(logs, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    error = 1.96 * (model.error or 0.0)
    below, above = np.hypot(np.maximum(value - low, 0), error), np.hypot(np.maximum(high - value, 0), error)
    bounds = np.exp([value, value - below, value + above]).T.tolist()
    return Priced(model, {pair: Interval(*one) for pair, one in zip(pairs, bounds, strict=True)})
