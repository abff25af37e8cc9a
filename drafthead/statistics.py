"""Acceptance figures and the intervals around them: plain arrays in, named results out, no IO.

The unit of resampling is the prompt, because tokens of one response are not independent. Every figure is a
ratio of sums over prompts (never a mean of per-prompt ratios), and its interval comes from SciPy's
bootstrap. A comparison resamples the same prompts of both methods. What this gives up is the variation
between server restarts, which no resampling of one run can show: repeat the run for that.

Training takes a constant from here: SciPy is imported where it is used, as a machine may lack it that only trains.

P prompts, K draft positions.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

CONFIDENCE = 0.95
RESAMPLES = 2000
_BATCH = 100  # resamples held in memory at a time; BCa's are as many as there are prompts
# Fewer give no interval of a change, and decide nothing. Resampled, 2 prompts without any difference are called
# resolved 44 times in a hundred, 8 still 12 times (a P95 19 times), 16 of them 6 times.
FEWEST_PROMPTS = 16
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Interval:
    """An estimate and its two-sided interval, in the unit of the estimate; NaN where nothing was observed."""

    value: float
    low: float
    high: float

    def __add__(self, offset: float) -> "Interval":
        return Interval(self.value + offset, self.low + offset, self.high + offset)

    def __format__(self, form: str) -> str:
        """`2.41 [2.30, 2.52]`, each number in that form; without bounds where there are none."""
        bounds = f" [{self.low:{form}}, {self.high:{form}}]" if np.isfinite(self.low) else ""
        return f"{self.value:{form}}{bounds}"

    def scaled(self, factor: float) -> "Interval":
        """Value and bounds times a positive factor."""
        return Interval(self.value * factor, self.low * factor, self.high * factor)


@dataclass(frozen=True)
class Change(Interval):
    """A relative difference between two methods, as a fraction; positive is better: 0.05 is 5 % better than the other.

    Its bounds are NaN where resampling prompts gives no interval at all.
    """

    @property
    def resolved(self) -> bool:
        """Whether the interval leaves zero out; otherwise nothing can be said about the sign."""
        return bool(self.low > 0 or self.high < 0)

    @property
    def loss(self) -> float:
        """How much is lost of what the other method has, as a fraction; negative: gained."""
        return -self.value

    def amount(self, unit: str = " %") -> str:
        """The value alone, as `text` begins."""
        return f"{100 * self.value:+.1f}{unit}" if np.isfinite(self.value) else "–"

    def text(self, unit: str = " %") -> str:
        """`+36.0 % [+27.2, +45.7]`, marked where nothing follows from it; a dash where nothing was observed.

        Args:
            unit: unit written behind the value; empty where the header of a column says per cent.
        """
        amount = self.amount(unit)
        if amount == "–":
            return amount
        if not np.isfinite(self.low):
            return f"{amount}, no interval"
        return f"{amount} [{', '.join(self._bounds())}]{'' if self.resolved else ', unresolved'}"

    def _bounds(self) -> tuple[str, str]:
        return f"{100 * self.low:+.1f}", f"{100 * self.high:+.1f}"


class TimeChange(Change):
    """The change of a time, baseline / method - 1: written as how many times longer or shorter, as `-57 %` misleads."""

    @property
    def loss(self) -> float:
        """How much longer it takes, as a fraction of the baseline's time."""
        return 1 / (1 + self.value) - 1 if self.value > -1 else np.inf

    def amount(self, unit: str = "") -> str:
        """`2.3 times longer`; a time has no other unit."""
        if not np.isfinite(self.value) or self.value <= -1:
            return "–"
        factor = self._factors(self.value)[0]
        if f"{factor:.2f}" == "1.00":
            return "as long"
        return f"{factor:.{self._digits}f} times {'shorter' if self.value > 0 else 'longer'}"

    def _bounds(self) -> tuple[str, str]:
        low, high = sorted(self._factors(self.low, self.high))
        return f"{low:.{self._digits}f}", f"{high:.{self._digits}f}"

    def _factors(self, *values: float) -> list[float]:
        """How many times longer or shorter, whichever the estimate is; a bound on the other side is below 1."""
        return [1 + value if self.value > 0 else 1 / (1 + value) for value in values]

    @property
    def _digits(self) -> int:
        return 2 if max(self._factors(self.value)) < 2 else 1


def acceptance_length(drafts: ArrayLike, accepted: ArrayLike) -> float:
    """Tokens gained per verified draft, bonus token included: 1 + Σ accepted / Σ drafts (vLLM's formula).

    Args:
        drafts: (P,) verification steps that had a draft.
        accepted: (P,) draft tokens accepted.
    """
    return 1.0 + float(ratio_of_sums(accepted, drafts))


def few(prompts: int) -> str:
    """What is written behind an acceptance length from so few prompts that it decides nothing; empty otherwise."""
    return f" (n = {prompts}, too few)" if prompts < FEWEST_PROMPTS else ""


def acceptance_by_position(
    drafts: ArrayLike, accepted_at: ArrayLike, reached_at: ArrayLike | None = None
) -> tuple[Array, Array]:
    """Acceptance by draft position, each (K,) and in [0, 1].

    The first is the share of drafts in which positions 0 to k were all accepted; the second the same among the drafts
    that got as far as position k: that proposed a token there, and in which positions 0 to k-1 were accepted.

    Args:
        drafts: (P,) verification steps that had a draft.
        accepted_at: (P, K) how often position k was accepted, which implies all positions before it.
        reached_at: (P, K) how often all positions before k were accepted and one was proposed at k; None: whenever they
            were accepted, which holds where every draft is K tokens long.
    """
    counts = np.asarray(accepted_at, float).sum(axis=0)  # (K,)
    total = np.asarray(drafts, float).sum()
    reached = [total, *counts[:-1]] if reached_at is None else np.asarray(reached_at, float).sum(axis=0)
    with np.errstate(invalid="ignore", divide="ignore"):
        return counts / total, counts / reached


def acceptance_length_interval(drafts: ArrayLike, accepted: ArrayLike) -> Interval:
    """`acceptance_length` with its interval by bootstrap over prompts."""
    return ratio_interval(accepted, drafts) + 1.0


def ratio_interval(numerator: ArrayLike, denominator: ArrayLike) -> Interval:
    """Σ numerator / Σ denominator with its BCa interval (Efron 1987) by bootstrap over prompts.

    Args:
        numerator: (P,) one value per prompt.
        denominator: (P,) one value per prompt, in the same order; the result is NaN when it sums to zero.
    """
    return bootstrap_interval((numerator, denominator), ratio_of_sums, "BCa")


def length_difference(
    drafts: ArrayLike, accepted: ArrayLike, other_drafts: ArrayLike, other_accepted: ArrayLike
) -> Interval:
    """Acceptance length minus that of another method on the same prompts, in tokens, paired by prompt."""

    def difference(a: Array, d: Array, oa: Array, od: Array, axis: int = -1) -> Array:
        return ratio_of_sums(a, d, axis) - ratio_of_sums(oa, od, axis)

    return bootstrap_interval((accepted, drafts, other_accepted, other_drafts), difference, "percentile")


def length_change(
    ours: tuple[ArrayLike, ArrayLike], theirs: tuple[ArrayLike, ArrayLike], same_seeds: bool = False
) -> Change:
    """Acceptance length over that of another head, less 1, with an interval over prompts and seeds of training.

    Prompts are drawn once for both heads, seeds for each (the pigeonhole bootstrap, Owen 2007) or, where both have the
    same, once as well: heads of one seed begin with the same weights and read the same batches. With one seed the
    interval is over prompts alone; of S seeds the variance comes out too small by (S - 1) / S. Fewer prompts than
    FEWEST_PROMPTS give no interval.

    Args:
        ours: drafts and accepted drafts, (P, S) each, of P prompts and S seeds.
        theirs: drafts and accepted drafts of another head on the same prompts, (P, S') each.
        same_seeds: whether column s of both has the same seed.
    """
    (drafts, accepted), other = ([np.asarray(a, float) for a in pair] for pair in (ours, theirs))
    rng, P = np.random.default_rng(0), len(drafts)
    times = rng.multinomial(P, np.full(P, 1 / P), RESAMPLES)  # (N, P)

    def drawn(S: int) -> np.ndarray:
        return rng.multinomial(S, np.full(S, 1 / S), RESAMPLES)  # (N, S)

    def lengths(drafts: Array, accepted: Array, of_seed: np.ndarray) -> Array:
        return 1 + ratio_of_sums(times @ accepted * of_seed, times @ drafts * of_seed)

    of_seed = drawn(drafts.shape[1])
    of_other = of_seed if same_seeds else drawn(other[0].shape[1])
    changes = lengths(drafts, accepted, of_seed) / lengths(other[0], other[1], of_other) - 1
    bounds = [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2]
    low, high = np.nanquantile(changes, bounds) if P >= FEWEST_PROMPTS else (np.nan, np.nan)
    value = acceptance_length(drafts.ravel(), accepted.ravel()) / acceptance_length(*(a.ravel() for a in other)) - 1
    return Change(value, float(low), float(high))


def proportion_interval(successes: int, total: int) -> Interval:
    """A share of independent trials with its Wilson score interval (Wilson 1927)."""
    if total == 0:
        return Interval(np.nan, np.nan, np.nan)
    from scipy import stats

    bounds = stats.binomtest(successes, total).proportion_ci(CONFIDENCE, method="wilson")
    return Interval(successes / total, bounds.low, bounds.high)


def ratio_of_sums(top: ArrayLike, bottom: ArrayLike, axis: int = -1) -> Array:
    """Σ top / Σ bottom along an axis; NaN or infinite where the bottom sums to zero."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.asarray(top, float).sum(axis) / np.asarray(bottom, float).sum(axis)


def bootstrap_interval(arrays: tuple[ArrayLike, ...], statistic: Callable[..., Array], method: str) -> Interval:
    """A statistic of paired (P,) arrays with its bootstrap interval over P; `method` as in scipy.stats.bootstrap."""
    data = tuple(np.asarray(array, float) for array in arrays)
    value = float(statistic(*data, axis=-1))
    if not np.isfinite(value):  # nothing was observed
        return Interval(np.nan, np.nan, np.nan)
    # Identical prompts leave nothing to resample, and BCa divides by their spread.
    if len(data[0]) < 2 or all(np.ptp(array) == 0 for array in data):
        return Interval(value, value, value) if len(data[0]) > 1 else Interval(value, np.nan, np.nan)
    bounds = resampled_bounds(data, statistic, method)
    if np.isnan(bounds.low) and method == "BCa":
        bounds = resampled_bounds(data, statistic, "percentile")
    return Interval(value, float(bounds.low), float(bounds.high))


def resampled_bounds(data: tuple[Array, ...], statistic: Callable[..., Array], method: str) -> Any:
    """The bounds alone, with attributes `low` and `high`."""
    from scipy import stats

    with np.errstate(invalid="ignore", divide="ignore"), warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.DegenerateDataWarning)  # NaN bounds say it, and callers look at them
        return stats.bootstrap(
            data, statistic, paired=True, vectorized=True, n_resamples=RESAMPLES,
            confidence_level=CONFIDENCE, method=method, rng=np.random.default_rng(0), batch=_BATCH,
        ).confidence_interval  # fmt: skip


def stratified_draws(sent: NDArray[np.bool_], resamples: int, rng: np.random.Generator) -> Array:
    """How often each prompt is drawn in each resampling, (resamples, P): a stratified bootstrap over several loads.

    A stratum are the prompts that the same loads sent (Davison and Hinkley 1997, section 3.2). How many prompts a load
    sends is chosen, not chance, and a draw over all of them would now and then leave a short load without any: no
    figure, and so no interval. A prompt that several loads sent is drawn for all of them at once.

    Args:
        sent: (L, P) whether a load sent a prompt.
    """
    times = np.zeros((resamples, sent.shape[1]))
    patterns, stratum = np.unique(sent, axis=1, return_inverse=True)
    for index in range(patterns.shape[1]):
        members = np.flatnonzero(stratum.ravel() == index)
        times[:, members] = rng.multinomial(len(members), np.full(len(members), 1 / len(members)), resamples)
    return times
