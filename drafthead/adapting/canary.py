"""Whether a candidate takes the place of the head in service: by replay, then on real requests.

Both answer the newest held-out traffic in vLLM, prompt by prompt (eval/acceptance.py), and the comparison is paired.
Then they take turns in the running server, and the requests that each answered are compared, which are different ones.
By both the candidate has to be resolved better over all, and no workload may have lost more than a bound: the lower end
of each workload's 95 % interval lies above it. Workloads of fewer than 16 prompts decide nothing by themselves and are
judged together, as one, if they have 16.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from drafthead.adapting.capture import REST
from drafthead.config.evaluation import ALL
from drafthead.statistics import FEWEST_PROMPTS, Interval, acceptance_length_interval, length_difference


@dataclass(frozen=True)
class Verdict:
    """Whether the candidate is promoted, why, and its gain in acceptance length by workload, in tokens."""

    promoted: bool
    why: str
    gains: dict[str, Interval]

    def figures(self) -> dict[str, Any]:
        """For the history, as JSON, which has no NaN: gains without an interval are left out."""
        known = {name: gain for name, gain in self.gains.items() if not np.isnan(gain.low)}
        return {name: {k: round(v, 3) for k, v in asdict(gain).items()} for name, gain in known.items()}


def decide(served: pd.DataFrame, candidate: pd.DataFrame, worse_by: float) -> Verdict:
    """Compare two heads on the same prompts, or on requests that each answered where rows have no prompt_id.

    Args:
        served, candidate: rows with prompt_id, category, drafts, accepted (columns.yaml).
        worse_by: tokens of acceptance length that no workload may lose.
    """
    paired = "prompt_id" in served
    if paired:
        candidate = candidate.set_index("prompt_id").loc[served.prompt_id].reset_index()
    both = served, candidate
    big = [n for n in served.category.unique() if min((rows.category == n).sum() for rows in both) >= FEWEST_PROMPTS]
    sides = [rows.assign(workload=rows.category.where(rows.category.isin(big), REST)) for rows in both]
    parts = {ALL: sides} | {name: [rows[rows.workload == name] for rows in sides] for name in (*sorted(big), REST)}
    gains = {name: _gain(part[0], part[1], paired) for name, part in parts.items() if all(map(len, part))}
    judged = {name: gain for name, gain in gains.items() if min(map(len, parts[name])) >= FEWEST_PROMPTS}
    if ALL not in judged:
        return Verdict(False, f"{min(len(served), len(candidate))} prompts decide nothing", gains)
    if not gains[ALL].low > 0:
        return Verdict(False, f"not resolved better over all: {_text(gains[ALL])}", gains)
    if lost := [f"{name} {_text(found)}" for name, found in judged.items() if not found.low > -worse_by]:
        return Verdict(False, f"may be worse by {worse_by} tokens or more on {', '.join(lost)}", gains)
    return Verdict(True, f"better over all: {_text(gains[ALL])}, and on no workload worse by {worse_by}", gains)


def _gain(old: pd.DataFrame, new: pd.DataFrame, paired: bool) -> Interval:
    difference = length_difference if paired else independent_difference
    return difference(new.drafts, new.accepted, old.drafts, old.accepted)


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


def _text(gain: Interval) -> str:
    return f"{gain.value:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}] tokens"
