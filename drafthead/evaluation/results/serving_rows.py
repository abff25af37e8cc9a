"""The rows of a measurement under load as the report and the decision read them; columns: `evaluation.columns`.

Columns may be absent in a measurement that has one workload or one draft length; `read_serving` fills them in, so
that everything after it can count on them.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from drafthead.config.evaluation import ALL
from drafthead.evaluation.measuring import serving
from drafthead.evaluation.measuring.plan import is_conversations
from drafthead.evaluation.workload import BASELINE
from drafthead.artifacts import IDENTITY, read_json

LEVEL_KEYS = ["workload", "load", "concurrency"]


class ServingRows(NamedTuple):
    """Rows of requests and of runs, with every key column."""

    requests: pd.DataFrame
    runs: pd.DataFrame


def read_serving(directory: Path) -> ServingRows:
    """Every row of a serving artifact, completed.

    Raises:
        ArtifactError: the artifact's identity is damaged.
    """
    K = main_length(read_json(directory / IDENTITY))
    return completed(serving.read_requests(directory), serving.read_runs(directory), K)


def main_length(identity: dict[str, Any]) -> int:
    """The draft length of rows that do not say theirs: the first that the measurement lists."""
    given = identity["num_draft_tokens"]
    return given[0] if isinstance(given, list) else given


def completed(requests: pd.DataFrame, runs: pd.DataFrame, K: int) -> ServingRows:
    """The rows with every key column present; `workload` with temperature and GPUs, `prompts_of` without.

    Args:
        requests, runs: as `evaluation.measuring.serving` reads them.
        K: draft tokens of every method but the baseline, where the rows do not say.
    """
    runs = _completed(runs, K)
    if "running" not in runs:
        runs["running"] = np.nan
    runs["running"] = runs["running"].fillna(runs["achieved"])  # of a server that does not say
    if "prefix_queries" in runs:  # prompts that share nothing have no hits to lose
        rate = 100 * runs["prefix_hits"] / runs["prefix_queries"].where(runs["prefix_queries"] > 0)
        runs["prefix_hit_rate"] = rate.where(runs["workload"].map(is_conversations))
    return ServingRows(_completed(requests, K), runs)


def steady(rows: ServingRows, workload: str | None = None) -> ServingRows:
    """The rows of one workload at loads whose places were filled as they became free; None: the first workload.

    Only they say what a step of b requests costs.
    """
    workload = workload or rows.runs["workload"].iloc[0]
    kept = (frame[frame["workload"] == workload] for frame in rows)
    return ServingRows(*(frame[frame["load"] == "c" + frame["concurrency"].astype(str)] for frame in kept))


def _completed(rows: pd.DataFrame, K: int) -> pd.DataFrame:
    rows = rows.copy()
    drafted = rows["arm"] != BASELINE
    load = "c" + rows["concurrency"].astype(str)
    earlier: dict[str, Any] = {"k": K, "workload": ALL, "load": load, "temperature": 0.0, "tensor_parallel": 0, "throughput_only": False,
               "ttfot_s": np.nan, "prompt_tokens": 0}  # fmt: skip
    for column, value in earlier.items():
        if column not in rows:
            rows[column] = value
    rows["k"] = rows["k"].where(drafted, 0).astype(int)
    rows["prompts_of"] = rows["workload"]
    rows["workload"] = [_label(*own) for own in zip(rows["workload"], rows["temperature"], rows["tensor_parallel"])]
    return rows


def _label(workload: str, temperature: float, gpus: int) -> str:
    """The workload with what else sets its levels apart; rows of an earlier layout have it in their name."""
    apart = (f" T={temperature:g}" if temperature else "") + (f" TP{gpus}" if gpus > 1 else "")
    return workload if workload.endswith(apart) else workload + apart


def methods_of(runs: pd.DataFrame) -> list[tuple[str, int]]:
    """(method, K) of everything that drafts, in order of appearance."""
    drafted = runs[runs["arm"] != BASELINE]
    return [(str(method), int(K)) for method, K in dict.fromkeys(zip(drafted["arm"], drafted["k"], strict=True))]
