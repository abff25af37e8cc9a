"""Whether a level keeps the service level, without and with the head, and how sure that is."""

from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from drafthead.config.traffic import SLOConfig
from drafthead.evaluation.results.levels import Level
from drafthead.statistics import CONFIDENCE, Array

Kept = Literal["kept", "missed", "unresolved"]


@dataclass(frozen=True)
class ServiceLevel:
    """One level against the limits.

    Attributes:
        baseline, head: whether each keeps every limit.
        text: both in words, with the figures; empty without a limit.
    """

    baseline: Kept
    head: Kept
    text: str


def service_level(level: Level, slo: SLOConfig) -> ServiceLevel:
    """The share of requests within each limit, against the share that must be.

    The percentile keeps a limit when at least that share of requests does, so the interval is that of a share
    (Clopper and Pearson 1934), which holds for any distribution of times.
    """
    verdicts: dict[str, list[Kept]] = {"base": [], "head": []}
    limits = []
    for name, column, limit_ms in (("TTFT", "ttft_s", slo.ttft_ms), ("TPOT", "tpot_s", slo.tpot_ms)):
        if limit_ms is None:
            continue
        figures = []
        for side, found in verdicts.items():
            times = level.paired[f"{column}_{side}"].dropna().to_numpy(float)
            found.append(_keeps(times, limit_ms / 1e3, slo.percentile / 100))
            at = f"{1e3 * np.percentile(times, slo.percentile):.1f} ms" if len(times) else "no request has it"
            figures.append(f"{at} ({found[-1]})")
        limits.append(f"{name} P{slo.percentile} {' → '.join(figures)} of {limit_ms:g} ms")
    return ServiceLevel(_worst(verdicts["base"]), _worst(verdicts["head"]), "; ".join(limits))


def _keeps(times: Array, limit: float, share: float) -> Kept:
    if not len(times):  # responses of one token have no time per token
        return "unresolved"
    within = stats.binomtest(int((times <= limit).sum()), len(times)).proportion_ci(CONFIDENCE, method="exact")
    if within.low >= share:
        return "kept"
    return "missed" if within.high < share else "unresolved"


def _worst(found: list[Kept]) -> Kept:
    return next((state for state in ("missed", "unresolved") if state in found), "kept")
