"""Whether a candidate takes the place of the head in service.

Both answer the newest held-out traffic in vLLM, prompt by prompt (eval/acceptance.py); the comparison is paired. The
candidate is promoted when it is resolved better over all, and no workload may have lost more than a bound: the lower
end of each workload's 95 % interval lies above it. Workloads of fewer than 16 prompts decide nothing by themselves and
are judged together, as one, if they have 16.
"""

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd

from drafthead.statistics import FEWEST_PROMPTS, Interval, length_difference

ALL, REST = "all", "others"


@dataclass(frozen=True)
class Verdict:
    """Whether the candidate is promoted, why, and its gain in acceptance length by workload, in tokens."""

    promoted: bool
    why: str
    gains: dict[str, Interval]

    def figures(self) -> dict[str, Any]:
        """For the history, as JSON."""
        return {name: {k: round(v, 3) for k, v in asdict(gain).items()} for name, gain in self.gains.items()}


def decide(served: pd.DataFrame, candidate: pd.DataFrame, worse_by: float) -> Verdict:
    """Compare two heads on the same prompts.

    Args:
        served, candidate: rows with prompt_id, category, drafts, accepted (columns.yaml).
        worse_by: tokens of acceptance length that no workload may lose.
    """
    rows = served.merge(candidate, on="prompt_id", suffixes=("", "_new"), validate="one_to_one")
    sizes = rows.category.value_counts()
    rows["workload"] = np.where(rows.category.map(sizes) < FEWEST_PROMPTS, REST, rows.category)
    gains = {ALL: _gain(rows)} | {str(name): _gain(part) for name, part in rows.groupby("workload")}
    if len(rows) < FEWEST_PROMPTS:
        return Verdict(False, f"{len(rows)} held-out prompts decide nothing", gains)
    if not gains[ALL].low > 0:
        return Verdict(False, f"not resolved better over all: {_text(gains[ALL])}", gains)
    judged = {name: gain for name, gain in gains.items() if (rows.workload == name).sum() >= FEWEST_PROMPTS}
    if lost := [f"{name} {_text(gain)}" for name, gain in judged.items() if not gain.low > -worse_by]:
        return Verdict(False, f"may be worse by {worse_by} tokens or more on {', '.join(lost)}", gains)
    return Verdict(True, f"better over all: {_text(gains[ALL])}, and on no workload worse by {worse_by}", gains)


def _gain(rows: pd.DataFrame) -> Interval:
    return length_difference(rows.drafts_new, rows.accepted_new, rows.drafts, rows.accepted)


def _text(gain: Interval) -> str:
    return f"{gain.value:+.2f} [{gain.low:+.2f}, {gain.high:+.2f}] tokens"
