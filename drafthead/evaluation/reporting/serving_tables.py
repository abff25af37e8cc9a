"""Tables of the measurement under load: every level, geometric means, what load was applied, memory and cost."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from drafthead.evaluation.comparison import FEWEST_PROMPTS
from drafthead.evaluation.decision.cost import cost_per_million
from drafthead.evaluation.measuring.plan import Plan
from drafthead.evaluation.measuring.presets import Preset
from drafthead.evaluation.measuring.request_metrics import FORMULAS
from drafthead.evaluation.reporting.tables import Cell, Table, change_cell, print_table
from drafthead.evaluation.results.imports import ImportedLevel
from drafthead.evaluation.results.levels import MEASURES, THROUGHPUT, Level, geometric_means
from drafthead.evaluation.workload import BASELINE, NAMES
from drafthead.statistics import acceptance_length


def series_name(method: str, K: int) -> str:
    """A method at a draft length, as every table and plot names it."""
    return f"{NAMES.get(method, method)}, K = {K}" if K else NAMES.get(method, method)


def level_name(level: Level, levels: Sequence[Level]) -> str:
    """The load, with its workload where there is more than one."""
    several = len({other.workload for other in levels}) > 1
    load = str(level.concurrency) if level.steady else level.load
    return f"{level.workload}, {load}" if several else load


def _load_label(levels: Sequence[Level]) -> str:
    return "Concurrency" if all(level.steady for level in levels) else "Load"


def length_cell(level: Level) -> Cell:
    """Acceptance length under load; a dash where nothing was drafted or the text means nothing."""
    return Cell("–" if np.isnan(level.acceptance_length) else f"{level.acceptance_length:.2f}")


def series_of(levels: Sequence[Level]) -> dict[tuple[str, str, int], list[Level]]:
    """(workload, method, K) -> its levels, in the order of the levels."""
    found: dict[tuple[str, str, int], list[Level]] = {}
    for level in levels:
        found.setdefault((level.workload, level.method, level.K), []).append(level)
    return found


def serving_tables(levels: Sequence[Level], price: float | None = None, gpus: int = 1) -> list[Table]:
    """Every table, one with all measures for each method and draft length.

    Args:
        levels: measured.
        price: per GPU and hour; None leaves cost out.
        gpus: that serve.
    """
    tables = [_measures_table(method, K, own) for (method, K), own in _by_series(levels).items()]
    tables += [table for key, own in series_of(levels).items() for table in _means_table(*key, own)]
    tables.append(_load_table(levels))
    return tables if price is None else [*tables, _cost_table(levels, price, gpus)]


def _by_series(levels: Sequence[Level]) -> dict[tuple[str, int], list[Level]]:
    found: dict[tuple[str, int], list[Level]] = {}
    for level in levels:
        found.setdefault((level.method, level.K), []).append(level)
    return found


def _measures_table(method: str, K: int, levels: Sequence[Level]) -> Table:
    rows = []
    for level in levels:
        for measure in MEASURES:
            values = [f"{v * measure.scale:.{measure.digits}f}" for v in level.values[measure.key]]
            name, load = f"{measure.label} ({measure.unit})", level_name(level, levels)
            change = change_cell(level.changes[measure.key], level.reached)
            rows.append([Cell(name), Cell(load), *map(Cell, values), change])
    note = (
        "Positive = better everywhere. Change relative to the baseline, for times baseline / head − 1; brackets: "
        "95 % paired bootstrap over prompts, with what blocks of server starts differ by. Grey: the interval includes "
        f"zero, or there is none: fewer than {FEWEST_PROMPTS} prompts, or requests that waited together. "
        "ITL is the gap between chunks, and a chunk of a speculative server carries several tokens: it gets worse by "
        "design; TPOT is per token."
    )
    if any(not level.steady for level in levels):
        note += (
            " At a request rate (r…) throughput is what was sent, whoever serves: times tell methods apart, and the "
            "verdict leaves such loads out."
        )
    columns = ["Measure", _load_label(levels), "Baseline", NAMES.get(method, method), "Change (%)"]
    return Table(f"{series_name(method, K)}: same prompts as the baseline", columns, rows, note)


def _means_table(workload: str, method: str, K: int, levels: Sequence[Level]) -> list[Table]:
    means = geometric_means(levels)
    if not means:
        return []
    rows = []
    for mean in means:
        values = [f"{v * mean.measure.scale:.{mean.measure.digits}f}" for v in mean.values]
        worst = mean.worst.changes[mean.measure.key]
        tone = "better" if mean.better == mean.levels else "worse" if mean.worse == mean.levels else "unresolved"
        rows.append(
            [
                Cell(f"{mean.measure.label} ({mean.measure.unit})"),
                *map(Cell, values),
                Cell(f"{100 * mean.change:+.1f}", tone),  # type: ignore[arg-type]
                Cell(str(mean.worst.concurrency)),
                change_cell(worst, mean.worst.reached),
                Cell(f"{mean.better} / {mean.worse} of {mean.levels}"),
            ]
        )
    note = (
        "Over the loads of fixed concurrency that were reached. A mean says nothing of the worst level, so "
        "that stands beside it; the mean is coloured only when every level is resolved the same way."
    )
    columns = [
        "Measure",
        "Baseline",
        NAMES.get(method, method),
        "Change (%)",
        "Worst at",
        "Change there (%)",
        "Better / worse",
    ]
    title = f"Geometric means over concurrency: {series_name(method, K)}, {workload} prompts"
    return [Table(title, columns, rows, note)]


def _load_table(levels: Sequence[Level]) -> Table:
    rows = [
        [
            Cell(series_name(level.method, level.K)),
            Cell(level_name(level, levels)),
            *(Cell(f"{level.running[method]:.1f}") for method in (BASELINE, level.method)),
            Cell("yes" if level.reached else "not reached", "" if level.reached else "unresolved"),
            Cell(str(level.pairs)),
            Cell(str(level.failed)),
            length_cell(level),
        ]
        for level in levels
    ]
    columns = [
        "Method",
        f"{_load_label(levels)} requested",
        "Achieved, baseline",
        "Achieved, method",
        "Reached",
        "Paired prompts",
        "Failed",
    ]
    return Table("Load", [*columns, "Acceptance length"], rows)


def _cost_table(levels: Sequence[Level], price: float, gpus: int) -> Table:
    rows = []
    for level in levels:
        costs = [cost_per_million(price, level.gpus or gpus, v) for v in level.values[THROUGHPUT.key]]
        name = series_name(level.method, level.K)
        change = change_cell(level.changes[THROUGHPUT.key], level.reached)
        rows.append([Cell(name), Cell(level_name(level, levels)), *(Cell(f"{cost:.3f}") for cost in costs), change])
    served = " or ".join(map(str, sorted({level.gpus or gpus for level in levels})))
    note = (
        f"{price:g} per GPU and hour × {served} GPU(s), in the currency of the price; all costs on output tokens. The "
        "change is that of throughput, which is the inverse of cost: positive = cheaper."
    )
    if any(level.K == 0 for level in levels):
        note += " An endpoint is priced as if it ran on as many."
    return Table(
        "Cost per 1M output tokens",
        ["Method", _load_label(levels), "Baseline", "Method's cost", "Change (%)"],
        rows,
        note,
    )


def memory_table(runs: pd.DataFrame) -> Table | None:
    """GPU memory and KV cache that a head takes away; None where the runs do not say."""
    labels = {
        "kv_cache_tokens": ("KV cache (tokens)", "{:,.0f}"),
        "weights_gib": ("Weights (GiB)", "{:.2f}"),
        "prefix_hit_rate": ("Prefix-cache hits of conversations (%)", "{:.1f}"),
    }
    columns = [c for c in labels if c in runs and runs[c].fillna(0).any()]
    if not columns:
        return None
    found = runs.groupby(["arm", "k"], sort=False)[columns].mean()
    baseline = found.xs(BASELINE, level="arm").iloc[0] if BASELINE in found.index.get_level_values("arm") else None
    rows = []
    for (method, K), (_, values) in zip(found.index.tolist(), found.iterrows(), strict=True):
        cells = [Cell(series_name(method, K))]
        for column in columns:
            value = values[column]
            cells.append(Cell(labels[column][1].format(value) if np.isfinite(value) else "–"))
            relative = np.nan if baseline is None else 100 * (value / baseline[column] - 1)
            cells.append(Cell("–" if method == BASELINE or not np.isfinite(relative) else f"{relative:+.1f}"))
        rows.append(cells)
    header = ["Method", *(text for column in columns for text in (labels[column][0], "Against the baseline (%)"))]
    note = (
        "What the server says after its start, and of conversations. Fewer tokens in the KV cache mean "
        "fewer requests at once, fewer hits a longer wait for the first token."
    )
    return Table("Memory and cache", header, rows, note)


def print_serving(levels: Sequence[Level]) -> None:
    """The tables of the measurement under load on the terminal."""
    for table in serving_tables(levels):
        print_table(table)


# Serving figures without a comparison: what a plan will do, what was measured, what another tool's file says.


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
