"""From rows of acceptance to the figures of the report, each with its interval; no IO and no formatting."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from drafthead.data.responses import LOOP_LIMIT
from drafthead.statistics import (
    Array,
    Interval,
    PositionAcceptance,
    acceptance_by_position,
    acceptance_length_interval,
    acceptance_rate,
    proportion_interval,
)
from drafthead.evaluation.workload import BASELINE, BASELINE_AGAIN

ALL = "all"


@dataclass(frozen=True)
class MethodAcceptance:
    """One method on one workload, over prompts whose baseline response does not loop.

    Attributes:
        method, category, K: which; category "all" pools every prompt.
        prompts: how many.
        length: acceptance length, 1 + accepted / drafts.
        rate: accepted / proposed.
        tokens_per_step: output tokens per run of the target, steps without a draft included; below `length`
            for methods that often have nothing to propose.
        positions: acceptance at each draft position.
    """

    method: str
    category: str
    K: int
    prompts: int
    length: Interval
    rate: float
    tokens_per_step: float
    positions: PositionAcceptance


@dataclass(frozen=True)
class AcceptanceSummary:
    """What the offline measurement says of its main condition.

    Attributes:
        temperature: of the responses.
        prompts: held-out prompts answered.
        looping: how many baseline responses repeat themselves and are left out of acceptance.
        ended: share of baseline responses that end by themselves.
        methods: one entry per method and workload, "all" first.
        identical: method -> share of prompts answered exactly as by the baseline, looping ones included. The
            second baseline is the noise floor. Empty above T = 0, where equality says nothing.
    """

    temperature: float
    prompts: int
    looping: int
    ended: float
    methods: list[MethodAcceptance]
    identical: dict[str, Interval]

    def of(self, method: str, category: str = ALL) -> MethodAcceptance:
        """The entry of a method on a workload."""
        return next(m for m in self.methods if (m.method, m.category) == (method, category))


def summarise_acceptance(rows: pd.DataFrame) -> AcceptanceSummary:
    """Aggregate the rows of `read_acceptance`."""
    by_method = {str(method): group.set_index("prompt_id") for method, group in rows.groupby("arm", sort=False)}
    baseline = by_method[BASELINE]
    kept = baseline.index[baseline["repeated"] <= LOOP_LIMIT]
    methods = [method for method in by_method if method not in (BASELINE, BASELINE_AGAIN)]
    categories = [ALL, *sorted({*baseline["category"]} - {ALL})]
    temperature = float(baseline["temperature"].iloc[0])
    others = [method for method in by_method if method != BASELINE] if temperature == 0 else []
    return AcceptanceSummary(
        temperature=temperature,
        prompts=len(baseline),
        looping=len(baseline) - len(kept),
        ended=float((baseline["finish_reason"] == "stop").mean()),
        methods=[_method(m, c, by_method[m].loc[kept]) for m in methods for c in categories],
        identical={method: _identical(baseline, by_method[method]) for method in others},
    )


def _method(method: str, category: str, rows: pd.DataFrame) -> MethodAcceptance:
    K = int(rows["k"].max()) if len(rows) else 0
    rows = rows if category == ALL else rows[rows["category"] == category]
    drafts, accepted = rows["drafts"], rows["accepted"]
    tokens = rows["num_tokens"]
    # A step yields its accepted drafts and one token more; drafts accepted beyond a stop are not output.
    steps = tokens - np.minimum(accepted, tokens - 1)
    return MethodAcceptance(
        method=method,
        category=category,
        K=K,
        prompts=len(rows),
        length=acceptance_length_interval(drafts, accepted),
        rate=acceptance_rate(rows["proposed"], accepted),
        tokens_per_step=float(tokens.sum() / steps.sum()) if len(rows) else np.nan,
        positions=acceptance_by_position(drafts, _stacked(rows["accepted_at"], K), _stacked(rows["reached_at"], K)),
    )


def _identical(baseline: pd.DataFrame, method: pd.DataFrame) -> Interval:
    same = method["output_sha256"].loc[baseline.index] == baseline["output_sha256"]
    return proportion_interval(int(same.sum()), len(same))


def _stacked(lists: pd.Series, K: int) -> Array:
    """(prompts, K)"""
    return np.array([*lists], float).reshape(len(lists), K)
