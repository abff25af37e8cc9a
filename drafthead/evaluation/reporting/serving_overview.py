"""Serving figures without a comparison: what a plan will do, what was measured, what another tool's file says."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from drafthead.evaluation.measuring.plan import Plan
from drafthead.evaluation.measuring.presets import Preset
from drafthead.evaluation.measuring.request_metrics import FORMULAS
from drafthead.evaluation.reporting.tables import Cell, Table
from drafthead.evaluation.results.imports import ImportedLevel
from drafthead.evaluation.workload import NAMES
from drafthead.statistics import acceptance_length

_TIMES = {
    "ttft_s": "TTFT",
    "ttfot_s": "TTFOT",
    "tpot_s": "TPOT",
    "itl_s": "ITL",
    "tpot_all_s": "TPOT, all",
    "e2e_s": "Latency",
}
_LEVEL = ["workload", "load", "arm", "k", "tensor_parallel"]


def plan_table(plan: Plan, preset: Preset | None = None) -> Table:
    """Servers in the order they start, and what each is sent."""
    rows = []
    for run in plan.runs:
        workloads = ", ".join(dict.fromkeys(level.workload.name for level in run.levels))
        loads = ", ".join(dict.fromkeys(level.load.name for level in run.levels))
        count = str(sum(level.prompts for level in run.levels))
        texts = [NAMES[run.method], str(run.k), str(run.tensor_parallel), " ".join(run.flags), workloads, loads, count]
        rows.append([Cell(text) for text in texts])
    notes = [preset.note] if preset else []
    notes += [f"Left out: {reason}." for reason in plan.skipped]
    columns = ["Server", "K", "GPUs", "Flags", "Workloads", "Loads", "Prompts, at most"]
    return Table(preset.title if preset else "Plan", columns, rows, " ".join(notes), text_columns=6)


def overview_table(requests: pd.DataFrame, runs: pd.DataFrame) -> Table:
    """Every level of every server; blocks are pooled."""
    good = requests[requests["error"] == ""]
    rows = []
    for key, group in runs.groupby(_LEVEL, sort=False):
        first = group.iloc[0]
        of_level = good[(good[_LEVEL] == list(key)).all(axis=1)]
        duration = group["duration_s"].sum()
        reached = bool(group["reached"].all())
        texts = [first["workload"], first["load"], NAMES[first["arm"]], str(first["k"])]
        texts += ["yes" if reached else f"no: {group['achieved'].mean():.1f} in flight", str(group["failed"].sum())]
        texts += [f"{group['output_tokens'].sum() / duration:.1f}", *_medians(of_level)]
        texts += [_length(group, bool(first["throughput_only"]))]
        rows.append([Cell(text, "" if reached else "unresolved") for text in texts])
    columns = ["Workload", "Load", "Method", "K", "Reached", "Failed", "Output tok/s"]
    columns += [f"{label}, median (ms)" for label in _TIMES.values()] + ["Acceptance length"]
    return Table("Serving", columns, rows, _formulas(), text_columns=5)


def imported_table(levels: Sequence[Sequence[ImportedLevel]]) -> Table:
    """Levels of other tools' files, by our formulas and beside what the tool itself printed."""
    rows = []
    for level in (level for file in levels for level in file):
        texts = [
            level.tool,
            level.name,
            str(len(level.requests)),
            str(level.failed),
            f"{level.output_tokens_per_s:.1f}",
        ]
        texts += _medians(level.requests)
        texts += [", ".join(f"{name} {value:.1f}" for name, value in level.stated.items()) or "–"]
        rows.append([Cell(text) for text in texts])
    columns = [
        "Tool",
        "Level",
        "Requests",
        "Failed",
        "Output tok/s",
        *(f"{label}, median (ms)" for label in _TIMES.values()),
    ]
    return Table("Imported results", [*columns, "Its own medians (ms)"], rows, _formulas(), text_columns=2)


def _medians(requests: pd.DataFrame) -> list[str]:
    medians = [requests[column].median() for column in _TIMES]
    return ["–" if np.isnan(median) else f"{1e3 * median:.1f}" for median in medians]


def _length(runs: pd.DataFrame, throughput_only: bool) -> str:
    if throughput_only:
        return "throughput only"
    length = acceptance_length(runs["drafts"], runs["accepted"])
    return "–" if np.isnan(length) else f"{length:.2f}"


def _formulas() -> str:
    return "; ".join(f"{label}: {FORMULAS[column]}" for column, label in _TIMES.items()) + "."
