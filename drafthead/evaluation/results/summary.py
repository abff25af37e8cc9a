"""From rows of acceptance to the figures of the report, each with its interval; no IO and no formatting."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd

from drafthead.config.evaluation import ALL
from drafthead.data.responses import LOOP_LIMIT
from drafthead.evaluation.workload import BASELINE
from drafthead.statistics import (
    Array,
    Interval,
    acceptance_by_position,
    acceptance_length_interval,
    proportion_interval,
    ratio_of_sums,
)

_MOST = 0.5  # of a method's responses with a draft at every step: it is one that always drafts
FIRST_BIN = 64  # tokens; the bins after it are 64 to 127, 128 to 255, and so on


@dataclass(frozen=True)
class MethodAcceptance:
    """One method at one K, temperature and effort on one workload, over prompts whose baseline response does not loop.

    Attributes:
        method, category, K, temperature, effort: which; category "all" pools every prompt.
        prompts: how many.
        length: acceptance length, 1 + accepted / drafts.
        rate: accepted / proposed.
        tokens_per_step: output tokens per run of the target, steps without a draft included; below `length`
            for methods that often have nothing to propose.
        unconditional, conditional: (K,) acceptance at each draft position, of `acceptance_by_position`.
        identical: share of greedy responses equal to the baseline's, looping ones included; None at T > 0, where
            equality says nothing.
    """

    method: str
    category: str
    K: int
    temperature: float
    effort: str
    prompts: int
    length: Interval
    rate: float
    tokens_per_step: float
    unconditional: Array
    conditional: Array
    identical: Interval | None

    @property
    def condition(self) -> tuple[int, float, str]:
        """K, temperature and effort."""
        return self.K, self.temperature, self.effort


@dataclass(frozen=True)
class AcceptanceSummary:
    """What the offline measurement says of its main condition.

    Attributes:
        temperature: of the responses.
        prompts: held-out prompts answered.
        looping: how many baseline responses repeat themselves and are left out of acceptance.
        ended: share of baseline responses that end by themselves.
        methods: one entry per method and workload, "all" first.
        identical: method -> share of prompts answered exactly as by the baseline. That of the baseline, between its two
            runs, is the noise floor. Empty above T = 0.
        places: of `summarise_places`, looping responses left out.
    """

    temperature: float
    prompts: int
    looping: int
    ended: float
    methods: list[MethodAcceptance]
    identical: dict[str, Interval]
    places: tuple["PlaceAcceptance", ...] = ()

    def of(self, method: str, category: str = ALL) -> MethodAcceptance:
        """The entry of a method on a workload."""
        return next(m for m in self.methods if (m.method, m.category) == (method, category))


def summarise_acceptance(rows: pd.DataFrame) -> AcceptanceSummary:
    """Aggregate the rows of `read_acceptance`, which have one condition."""
    baseline = rows[(rows["method"] == BASELINE) & ~rows["again"]]
    entries = summarise_conditions(rows)
    kept = baseline["prompt_id"][baseline["repeated"] <= LOOP_LIMIT]
    return AcceptanceSummary(
        temperature=float(baseline["temperature"].iloc[0]),
        prompts=len(baseline),
        looping=int((baseline["repeated"] > LOOP_LIMIT).sum()),
        ended=float((baseline["finish_reason"] == "stop").mean()),
        methods=[entry for entry in entries if entry.method != BASELINE],
        identical={e.method: e.identical for e in entries if e.category == ALL and e.identical is not None},
        places=tuple(summarise_places(rows[rows["prompt_id"].isin(kept)])),
    )


class PlaceAcceptance(NamedTuple):
    """Acceptance length of a method at K in some tokens of a prompt, a response or both, over so many prompts."""

    method: str
    K: int
    place: str
    first: int
    prompts: int
    length: Interval


def summarise_places(rows: pd.DataFrame) -> Iterator[PlaceAcceptance]:
    """Acceptance of every method and K where it drafts: bins of doubling width, from `first` to twice that.

    Of a method that does not draft at every step, such as n-gram, it is not known where its rounds lie; neither of a
    response whose request the engine preempted.

    Args:
        rows: of requests, with columns method, k, prompt_id, prompt_tokens, num_tokens and accepted_by_step.
    """
    rows = rows[rows["accepted_by_step"].map(len) > 0]
    always = 1 + rows["accepted_by_step"].map(lambda steps: len(steps) + np.sum(steps)) >= rows["num_tokens"]
    for (method, _), drafted in rows.groupby(["method", "k"], sort=False):
        own = drafted[always[drafted.index]]
        if len(own) < _MOST * len(drafted):
            continue
        steps = own[["prompt_id", "prompt_tokens", "accepted_by_step"]].explode("accepted_by_step")
        steps["accepted"] = steps.pop("accepted_by_step").astype(int)
        # The first token is not drafted; a round follows what all rounds before it gave.
        before = (steps["accepted"] + 1).groupby(level=0).cumsum() - steps["accepted"]
        length = steps.pop("prompt_tokens")
        for place, at in (("prompt", length), ("response", before), ("prompt and response", length + before)):
            first = (2 ** np.floor(np.log2(at.clip(lower=1)))).where(at >= FIRST_BIN, 0)
            for start in np.unique(first):
                counted = steps[first == start].groupby("prompt_id")["accepted"].agg(["size", "sum"])
                interval = acceptance_length_interval(counted["size"], counted["sum"])
                yield PlaceAcceptance(str(method), int(own["k"].iloc[0]), place, int(start), len(counted), interval)


def summarise_conditions(rows: pd.DataFrame) -> list[MethodAcceptance]:
    """Aggregate the rows of `read_conditions`: every condition, over all prompts and by category.

    The second run of the baseline is one of them: what it has identical is the noise floor of its setting.
    """
    found = []
    for _, setting in rows.groupby(["temperature", "effort"], sort=False):
        first = (setting["method"] == BASELINE) & ~setting["again"]
        baseline = setting[first].set_index("prompt_id")
        kept = baseline.index[baseline["repeated"] <= LOOP_LIMIT]
        for _, drafted in setting[~first].groupby(["method", "k"], sort=False):
            for category in (ALL, *sorted({*baseline["category"]} - {ALL})):
                own = drafted if category == ALL else drafted[drafted["category"] == category]
                found.append(_entry(drafted.iloc[0], category, own.set_index("prompt_id"), baseline, kept))
    return found


def _entry(
    first: pd.Series, category: str, own: pd.DataFrame, baseline: pd.DataFrame, kept: pd.Index
) -> MethodAcceptance:
    same = own["output_sha256"] == baseline["output_sha256"].reindex(own.index)
    rows = own.loc[own.index.intersection(kept, sort=False)]
    K, drafts, accepted, tokens = int(first["k"]), rows["drafts"], rows["accepted"], rows["num_tokens"]
    # A step yields its accepted drafts and one token more; drafts accepted beyond a stop are not output.
    steps = tokens - np.minimum(accepted, tokens - 1)
    rate, unconditional, conditional = counted(rows, K, _stacked(rows["reached_at"], K))
    return MethodAcceptance(
        str(first["method"]), category, K, float(first["temperature"]), str(first["effort"]), len(rows),
        length=acceptance_length_interval(drafts, accepted),
        rate=rate,
        tokens_per_step=float(ratio_of_sums(tokens, steps)),
        unconditional=unconditional,
        conditional=conditional,
        identical=proportion_interval(int(same.sum()), len(same)) if first["temperature"] == 0 else None,
    )  # fmt: skip


def counted(rows: pd.DataFrame, K: int, reached_at: Array | None = None) -> tuple[float, Array, Array]:
    """Acceptance rate, and both of `acceptance_by_position`, of rows with the counters of requests or of servers.

    Args:
        rows: with columns drafts, proposed, accepted and accepted_at.
        K: draft tokens.
        reached_at: as in `acceptance_by_position`.
    """
    by_position = acceptance_by_position(rows["drafts"], _stacked(rows["accepted_at"], K), reached_at)
    return float(ratio_of_sums(rows["accepted"], rows["proposed"])), *by_position


def _stacked(lists: pd.Series, width: int) -> Array:
    """(rows, width)"""
    return np.array([*lists], float).reshape(len(lists), width)
