"""Before any head exists: what acceptance a head would need, what one of a given acceptance would bring, and whether
training it can pay.

The step times come from a measurement: of an untrained head (its steps take as long), or of an earlier head on the
same target and machine. The acceptance is assumed. Every draft token is accepted with the same probability here, given
those before it, so one number at one K gives AL(K) for every other. Decode only, as the cost model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy.optimize import brentq

from drafthead.evaluation.decision.cost import cost_per_million
from drafthead.evaluation.decision.cost_model import CostModel
from drafthead.evaluation.decision.speed import AcceptanceCurve

CAN, CANNOT, DEPENDS = "TRAINING CAN PAY", "TRAINING CANNOT PAY", "IT DEPENDS ON THE HEAD"
_WORTH = 0.01  # a gain below this is none


@dataclass(frozen=True)
class Money:
    """What decides beside speed; all in one currency.

    Attributes:
        price_per_gpu_hour, gpus: of serving.
        tokens_per_day: output tokens to serve.
        training: what regenerating, harvesting and training will cost.
        days: in which it must be earned.
    """

    price_per_gpu_hour: float
    gpus: int
    tokens_per_day: float
    training: float
    days: float


@dataclass(frozen=True)
class Worth:
    """What a head of an assumed acceptance would bring.

    Attributes:
        length: assumed acceptance length at K.
        speedup: over the traffic, with the best draft length at every load.
        loads: concurrency -> (best K, speedup there).
    """

    length: float
    speedup: float
    loads: dict[int, tuple[int, float]]


def even_curve(length: float, K: int, longest: int) -> AcceptanceCurve:
    """AL(1..longest) of drafts whose every token is accepted with the same probability, given those before.

    Args:
        length: acceptance length at K.
        K: where it holds.
        longest: how far to go.

    Raises:
        ValueError: no such drafts have that acceptance length.
    """
    if not 1 <= length <= K + 1:
        raise ValueError(f"an acceptance length of {length} at K = {K} cannot be: it lies between 1 and {K + 1}")

    def at(rate: float, k: int = K) -> float:
        return float(np.sum(rate ** np.arange(k + 1)))

    rate = brentq(lambda r: at(r) - length, 0.0, 1.0)
    return AcceptanceCurve({k: at(rate, k) for k in range(1, longest + 1)}, ())


def worth(model: CostModel, length: float, K: int, shares: dict[int, float], max_batch: int) -> Worth:
    """What a head of acceptance length `length` at K would bring over the traffic.

    Args:
        model: step times; its own acceptance is not used.
        length, K: assumed.
        shares: requests in flight -> share of the time.
        max_batch: the engine's max_num_seqs.
    """
    assumed = replace(model, curve=even_curve(length, K, max(model.lengths)))
    loads = {}
    for c in shares:
        batch = min(c, max_batch)
        best = assumed.best_draft(batch)
        loads[c] = best, assumed.speedup(batch, best)
    return Worth(length, 1 / sum(share / loads[c][1] for c, share in shares.items()), loads)


def needed_length(model: CostModel, K: int, shares: dict[int, float], max_batch: int, speedup: float = 1.0) -> float:
    """The acceptance length at K that gives a speedup over the traffic at that K alone; infinity when none does."""

    def over_traffic(length: float) -> float:
        ratios = {c: model.step_ratio(min(c, max_batch), K) for c in shares}
        return length / sum(share * ratios[c] for c, share in shares.items()) - speedup

    if over_traffic(K + 1) < 0:
        return np.inf
    return 1.0 if over_traffic(1.0) >= 0 else float(brentq(over_traffic, 1.0, K + 1))


def days_to_pay(money: Money, speedup: float, tokens_per_s: float) -> float:
    """Days until a head that serves `speedup` times as fast has earned its training; infinity when it never does."""
    cost = cost_per_million(money.price_per_gpu_hour, money.gpus, tokens_per_s)
    saved = cost * (1 - 1 / speedup) * money.tokens_per_day / 1e6
    return money.training / saved if saved > 0 else np.inf


def judge_training(
    model: CostModel, found: Sequence[Worth], tokens_per_s: float, money: Money | None = None
) -> tuple[str, str]:
    """The verdict over the assumed acceptance lengths, lowest to highest, and its reason.

    Args:
        model: whose error on held-out pairs widens both ends.
        found: one for every acceptance length assumed.
        tokens_per_s: of the baseline over the traffic.
        money: None: any gain of a per cent counts as paying.
    """
    margin = np.exp(1.96 * (model.error or 0.0))
    low, high = min(w.speedup for w in found) / margin, max(w.speedup for w in found) * margin
    gain = f"{low - 1:+.1%} to {high - 1:+.1%} over the traffic, decoding"
    if money is None:
        verdict = CAN if low > 1 + _WORTH else CANNOT if high < 1 + _WORTH else DEPENDS
        return verdict, gain
    days = [days_to_pay(money, speedup, tokens_per_s) for speedup in (low, high)]
    verdict = CAN if days[0] <= money.days else CANNOT if days[1] > money.days else DEPENDS
    waits = [f"{d:,.1f} days" if np.isfinite(d) else "never" for d in days]
    return verdict, f"{gain}; {money.training:,.2f} are earned after {waits[0]} at worst, {waits[1]} at best"
