"""Tables that set methods, K, temperatures and efforts beside each other."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from drafthead.data import looping
from drafthead.evaluation.reporting.tables import Cell, Table, interval_text, percent_text
from drafthead.evaluation.workload import BASELINE, BASELINE_AGAIN, NAMES
from drafthead.statistics import Interval, acceptance_length_interval, acceptance_rate, proportion_interval

ALL = "all"


@dataclass(frozen=True)
class ConditionSummary:
    """One method at one K, temperature and effort on one workload, over prompts whose baseline response does not loop.

    Attributes:
        method, k, temperature, effort, category: which; category "all" pools every prompt.
        prompts: how many.
        length: acceptance length, 1 + accepted / drafts, pooled.
        rate: accepted / proposed.
        unconditional: (K,) share of drafts that accepted position i.
        conditional: (K,) the same among drafts that accepted all before i and proposed one there.
        histogram: (K + 1,) share of drafts that accepted exactly j.
        identical: share of greedy responses equal to the baseline's at this setting, looping ones included; None at
            T > 0, where equality says nothing.
    """

    method: str
    k: int
    temperature: float
    effort: str
    category: str
    prompts: int
    length: Interval
    rate: float
    unconditional: np.ndarray
    conditional: np.ndarray
    histogram: np.ndarray
    identical: Interval | None


def summarise_conditions(rows: pd.DataFrame) -> list[ConditionSummary]:
    """Aggregate the rows of `read_conditions`: every condition, over all prompts and by category.

    The second baseline is one of them, without drafts: what it has identical is the noise floor of its setting.
    """
    found = []
    for setting in _split(rows, ["temperature", "effort"]):
        baseline = setting[setting["arm"] == BASELINE].set_index("prompt_id")
        kept = baseline.index[baseline["repeated"] <= looping.LIMIT]
        for group in _split(setting[setting["arm"] != BASELINE], ["arm", "k"]):
            found.append(_summary(group, ALL, kept, baseline))
            found += [
                _summary(part, str(part["category"].iloc[0]), kept, baseline)
                for part in _split(group, ["category"])
                if part["category"].iloc[0] != ALL
            ]
    return found


def _split(rows: pd.DataFrame, columns: list[str]) -> list[pd.DataFrame]:
    return [group for _, group in rows.groupby(columns, sort=False)]


def _summary(group: pd.DataFrame, category: str, kept: pd.Index, baseline: pd.DataFrame) -> ConditionSummary:
    rows, first = group.set_index("prompt_id"), group.iloc[0]
    same = rows["output_sha256"] == baseline["output_sha256"].reindex(rows.index)
    counted = rows.loc[rows.index.intersection(kept)]
    drafts = counted["drafts"].sum()
    accepted_at, reached_at, histogram = (_summed(counted[c]) for c in ("accepted_at", "reached_at", "histogram"))
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = accepted_at / drafts, accepted_at / reached_at, histogram / drafts
    return ConditionSummary(
        method=str(first["arm"]),
        k=int(first["k"]),
        temperature=float(first["temperature"]),
        effort=str(first["effort"]),
        category=category,
        prompts=len(counted),
        length=acceptance_length_interval(counted["drafts"], counted["accepted"]),
        rate=acceptance_rate(counted["proposed"], counted["accepted"]),
        unconditional=shares[0],
        conditional=shares[1],
        histogram=shares[2],
        identical=proportion_interval(int(same.sum()), len(same)) if first["temperature"] == 0 else None,
    )


def _summed(lists: pd.Series) -> np.ndarray:
    return np.sum(np.stack(list(lists)), axis=0, dtype=float) if len(lists) else np.zeros(1)


def conditions_table(summaries: Iterable[ConditionSummary]) -> Table:
    """Acceptance by method, K, temperature and effort, all workloads pooled."""
    rows = []
    for s in (s for s in summaries if s.category == ALL):
        texts = [*_setting(s), str(s.prompts), interval_text(s.length), _percent([s.rate])]
        texts += [_percent(s.unconditional), _percent(s.conditional), _percent(s.histogram)]
        texts += [percent_text(s.identical) if s.identical else "–"]
        rows.append([Cell(text) for text in texts])
    columns = [*_SETTING, "Prompts", "Acceptance length", "Rate (%)", "By position (%)", "Given the one before (%)"]
    columns += ["Accepted 0…K (%)", "Identical (%)"]
    note = (
        "Acceptance length is 1 + accepted / drafts, in tokens, and grows with K by construction: compare at equal K. "
        "Given the one before: among drafts that proposed a token there. Identical: greedy responses equal to the "
        f"baseline's of the setting; `{NAMES[BASELINE_AGAIN]}` is the floor. Brackets: 95 % bootstrap over prompts."
    )
    return Table("Acceptance side by side", columns, rows, note, text_columns=len(_SETTING))


def workloads_table(summaries: Sequence[ConditionSummary]) -> Table:
    """Acceptance length of every condition, a column for each workload."""
    workloads = sorted({s.category for s in summaries} - {ALL})
    lengths: dict[tuple[str, ...], dict[str, str]] = {}
    for s in summaries:
        if s.method != BASELINE_AGAIN:
            lengths.setdefault(_setting(s), {})[s.category] = interval_text(s.length)
    rows = [[Cell(text) for text in (*key, *(found.get(w, "–") for w in workloads))] for key, found in lengths.items()]
    return Table("Acceptance length by workload", [*_SETTING, *workloads], rows, text_columns=len(_SETTING))


_SETTING = ("Method", "K", "T", "Effort")


def _setting(s: ConditionSummary) -> tuple[str, ...]:
    return NAMES[s.method], str(s.k), f"{s.temperature:g}", s.effort


def _percent(shares: Iterable[float]) -> str:
    return " ".join("–" if np.isnan(share) else f"{100 * share:.1f}" for share in shares)
