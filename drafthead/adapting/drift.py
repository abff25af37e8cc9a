"""Whether acceptance has fallen, what else has changed, and whether a candidate is better: the statistics of the loop.

A one-sided CUSUM (Page 1954) adds up by how much requests fall short of the reference and raises the alarm above a
threshold. Of a request with n rounds and a accepted drafts, r accepted drafts per round in the reference and the
spread s of (a - r n) over it:

    z = (r n - a) / s, at most LARGEST      S = max(0, S + z - ALLOWANCE)      alarm: S > threshold

The threshold follows from the wanted run length, the mean number of requests between false alarms: the chain of S over
the reference's own z, on a grid, is solved for it (Brook and Evans 1972), so nothing is assumed about how z is
distributed. r is the lower end of its 95 % interval: with the mean of a small reference half of all charts would raise
false alarms much too often. z is bounded because one response that loops has the rounds of many (171 with 20 accepted
drafts, where 20 with 24 were usual: z = 21). What this gives up: falls smaller than about half a spread per request are
found late.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike, NDArray
from scipy.spatial.distance import jensenshannon

from drafthead.adapting.capture import DAY_S, REST, Record
from drafthead.config.evaluation import ALL
from drafthead.statistics import (
    FEWEST_PROMPTS,
    Interval,
    acceptance_length,
    acceptance_length_interval,
    length_difference,
    ratio_interval,
)

ALLOWANCE = 0.25  # spreads per request: the chart is tuned to falls of twice that
REFERENCE = 200  # requests of a head, that later ones are compared with
WINDOW = 20_000  # requests, the newest ones, that are compared with it: a fall that takes more to show is not seen
LEAST = 64  # requests of a workload in a reference, for a chart of its own
LARGEST = 3.0  # spreads that one request can count
_DAYS = 30  # in which one false alarm may come
_STATES = 120  # of the grid: the run length of a normal z comes out within 5 % of Siegmund's formula
_THRESHOLDS = np.arange(1.0, 60.0, 0.05)
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Chart:
    """What requests are compared with.

    Attributes:
        rate: accepted drafts per round, r.
        spread: standard deviation of a - r n, a accepted drafts in the n rounds of a request, s.
        threshold: value of the statistic S above which the chart alarms.
    """

    rate: float
    spread: float
    threshold: float

    def alarm(self, drafts: Array, accepted: Array) -> tuple[int, int] | None:
        """The first request at which S is above the threshold, and the one after S was last 0, where the fall began.

        None while it is not; (P,) rounds and accepted drafts in the order of the requests.
        """
        z = (self.rate * drafts - accepted) / self.spread
        sums = np.concatenate([[0.0], np.cumsum(np.minimum(z, LARGEST) - ALLOWANCE)])
        total = sums - np.minimum.accumulate(sums)  # S, and 0 before the first
        above = np.flatnonzero(total > self.threshold)
        return (int(above[0]) - 1, int(np.flatnonzero(total[: above[0]] == 0)[-1])) if len(above) else None


def make_chart(drafts: Array, accepted: Array, run_length: float) -> Chart | None:
    """A chart from the rounds (P,) and accepted drafts (P,) of a reference; None where all accept alike: no scale.

    Args:
        drafts, accepted: rounds and accepted drafts of each request.
        run_length: requests between false alarms, on average.
    """
    rate = ratio_interval(accepted, drafts).low
    shortfall = rate * drafts - accepted
    spread = float(shortfall.std(ddof=1))
    if np.isclose(spread, 0):
        return None
    z = (shortfall - shortfall.mean()) / spread  # as if r were the mean of all that is to come
    steps = np.minimum(z, LARGEST) - ALLOWANCE
    place = bisect_left(_THRESHOLDS, run_length, key=lambda threshold: mean_run_length(steps, threshold))
    return Chart(float(rate), spread, float(_THRESHOLDS[min(place, len(_THRESHOLDS) - 1)]))


def mean_run_length(steps: Array, threshold: float) -> float:
    """Mean number of steps, drawn from `steps`, until S = max(0, S + step) is above the threshold."""
    width = threshold / _STATES
    centres = np.arange(_STATES) * width  # of the cells; the first holds S = 0
    # Where each step leads from each cell: (states, steps), cell numbers; beyond the last is the alarm.
    to = np.clip(np.rint((centres[:, None] + steps[None, :]) / width), 0, _STATES).astype(int)
    chances = np.stack([np.bincount(cells, minlength=_STATES + 1) for cells in to]) / len(steps)
    stays = np.eye(_STATES) - chances[:, :_STATES]
    try:
        lengths = np.linalg.solve(stays, np.ones(_STATES))
    except np.linalg.LinAlgError:  # the alarm is never reached
        return float("inf")
    return float(lengths[0]) if lengths[0] > 0 else float("inf")


@dataclass(frozen=True)
class Alarm:
    """Acceptance of a workload has fallen: since when, when it showed, and how many of its requests later."""

    workload: str
    since: float
    seen: float
    requests: int


def charts_of(reference: Sequence[Record]) -> dict[str, Chart]:
    """Charts of all requests together, and of each workload that the reference has enough of.

    Together they raise at most one false alarm in _DAYS on average, at as many requests a day as the reference had.
    """
    large = {name: rows for name, rows in by_workload(reference).items() if len(rows) >= LEAST}
    groups = {ALL: reference, **(large if len(large) > 1 else {})}  # one workload is all
    at = [record["at"] for record in reference]  # several servers write segments of their own
    seconds = max(1.0, max(at) - min(at))
    per_request = _DAYS * DAY_S * len(groups) / seconds
    charts = {name: make_chart(*_columns(rows), per_request * len(rows)) for name, rows in groups.items()}
    return {name: chart for name, chart in charts.items() if chart}


def first_alarm(charts: Mapping[str, Chart], records: Sequence[Record]) -> Alarm | None:
    """The first alarm over the requests since the reference; None where there is none."""
    alarms = []
    for name, chart in charts.items():
        rows = [r for r in records if name in (ALL, r["workload"])]
        if (places := chart.alarm(*_columns(rows))) is not None:
            seen, began = places
            alarms.append(Alarm(name, rows[began]["at"], rows[seen]["at"], seen - began + 1))
    return min(alarms, key=lambda alarm: alarm.seen, default=None)


def by_workload(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Workload -> its requests."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record["workload"], []).append(record)
    return groups


def _columns(records: Sequence[Record]) -> tuple[Array, Array]:
    return np.array([r["drafts"] for r in records], float), np.array([r["accepted"] for r in records], float)


def length(records: Sequence[Record]) -> float:
    """Acceptance length of requests; NaN without a round."""
    return acceptance_length(*_columns(records))


def what_changed(before: Sequence[Record], now: Sequence[Record]) -> list[dict[str, Any]]:
    """Requests, mean lengths in tokens and acceptance length, before and now: of all, of workloads of 16 or more."""
    sides = [{ALL: list(rows), **by_workload(rows)} for rows in (before, now)]
    names = [n for n in {**sides[0], **sides[1]} if max(len(side.get(n, [])) for side in sides) >= FEWEST_PROMPTS]
    measures = {
        "requests": len,
        "prompt_tokens": lambda rows: _rounded(np.mean([r["prompt_tokens"] for r in rows])),
        "response_tokens": lambda rows: _rounded(np.mean([r["response_tokens"] for r in rows])),
        "acceptance_length": lambda rows: _rounded(length(rows)),
    }
    return [
        {"workload": name}
        | {
            key: [measure(side[name]) if side.get(name) else None for side in sides]
            for key, measure in measures.items()
        }
        for name in names
    ]


def token_distance(before: Iterable[Sequence[int]], now: Iterable[Sequence[int]]) -> float | None:
    """How far apart the tokens of two lots of captured text are, whatever their order and language.

    The Jensen-Shannon distance in bits (Lin 1991): 0 for the same shares of every token, 1 where none is shared. None
    where a lot is empty.
    """
    counts = [Counter(token for ids in lot for token in ids) for lot in (before, now)]
    if not all(counts):
        return None
    shares = ([count[token] for token in counts[0] | counts[1]] for count in counts)
    return _rounded(np.nan_to_num(jensenshannon(*shares, base=2)))  # NaN where its square is rounded below 0


def _rounded(value: Any) -> float:
    return round(float(value), 3)


# ---- Whether a candidate takes the place of the head in service ----
#
# Both answer the newest held-out traffic in vLLM, prompt by prompt (eval/acceptance.py), and the comparison is paired.
# Then they take turns in the running server, and the requests that each answered are compared, which are different
# ones. By both the candidate has to be resolved better over all, and no workload may have lost more than a bound: the
# lower end of each workload's 95 % interval lies above it. Workloads of fewer than 16 prompts decide nothing by
# themselves and are judged together, as one, if they have 16.


@dataclass(frozen=True)
class PromotionDecision:
    """Whether the candidate is promoted, why, and its gain in acceptance length by workload, in tokens."""

    promoted: bool
    why: str
    gains: dict[str, Interval]

    def figures(self) -> dict[str, Any]:
        """For the history, as JSON, which has no NaN: gains without an interval are left out."""
        known = {name: gain for name, gain in self.gains.items() if not np.isnan(gain.low)}
        return {name: {k: round(v, 3) for k, v in asdict(gain).items()} for name, gain in known.items()}


def decide(served: pd.DataFrame, candidate: pd.DataFrame, max_regression: float) -> PromotionDecision:
    """Compare two heads on the same prompts, or on requests that each answered where rows have no prompt_id.

    Args:
        served, candidate: rows with prompt_id, category, drafts, accepted (columns.yaml).
        max_regression: tokens of acceptance length that no workload may lose.
    """
    paired = "prompt_id" in served
    if paired:
        candidate = candidate.set_index("prompt_id").loc[served.prompt_id].reset_index()
    both = served, candidate
    big = [n for n in served.category.unique() if min((rows.category == n).sum() for rows in both) >= FEWEST_PROMPTS]
    sides = [rows.assign(workload=rows.category.where(rows.category.isin(big), REST)) for rows in both]
    parts = {ALL: sides} | {name: [rows[rows.workload == name] for rows in sides] for name in (*sorted(big), REST)}
    difference = length_difference if paired else independent_difference
    gains = {
        name: difference(new.drafts, new.accepted, old.drafts, old.accepted)
        for name, (old, new) in parts.items()
        if len(old) and len(new)
    }
    judged = {name: gain for name, gain in gains.items() if min(map(len, parts[name])) >= FEWEST_PROMPTS}
    if ALL not in judged:
        return PromotionDecision(False, f"{min(len(served), len(candidate))} prompts decide nothing", gains)
    if not gains[ALL].low > 0:
        return PromotionDecision(False, f"not resolved better over all: {gains[ALL]:+.2f} tokens", gains)
    if lost := [f"{name} {gain:+.2f} tokens" for name, gain in judged.items() if not gain.low > -max_regression]:
        return PromotionDecision(False, f"may be worse by {max_regression} tokens or more on {', '.join(lost)}", gains)
    return PromotionDecision(
        True, f"better over all: {gains[ALL]:+.2f} tokens, and on no workload worse by {max_regression}", gains
    )


def independent_difference(
    drafts: ArrayLike, accepted: ArrayLike, other_drafts: ArrayLike, other_accepted: ArrayLike
) -> Interval:
    """Acceptance length less that of another head on other requests, in tokens.

    From the two intervals by MOVER (Zou and Donner 2008): how far each reaches towards the other adds up in squares.
    """
    new, old = (acceptance_length_interval(*pair) for pair in ((drafts, accepted), (other_drafts, other_accepted)))
    value = new.value - old.value
    low = value - np.hypot(new.value - new.low, old.high - old.value)
    high = value + np.hypot(new.high - new.value, old.value - old.low)
    return Interval(value, float(low), float(high))
