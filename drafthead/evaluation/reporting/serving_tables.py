"""Tables of the measurement under load: every level, geometric means, acceptance, matrices, memory and cost."""

from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from drafthead.evaluation.comparison import FEWEST_PROMPTS
from drafthead.evaluation.decision.cost import cost_per_million
from drafthead.evaluation.measuring.plan import Plan
from drafthead.evaluation.measuring.presets import Preset
from drafthead.evaluation.measuring.request_metrics import FORMULAS
from drafthead.evaluation.reporting.tables import Cell, Table, change_cell, number, table
from drafthead.evaluation.results.imports import ImportedLevel
from drafthead.evaluation.results.levels import MEASURE, THROUGHPUT, Level, Measure, geometric_means
from drafthead.evaluation.workload import BASELINE, NAMES
from drafthead.statistics import acceptance_by_position, acceptance_length, acceptance_rate, geometric_mean


def series_name(method: str, K: int) -> str:
    """A method at a draft length, as every table and plot names it."""
    return f"{NAMES[method]}, K = {K}" if K else NAMES.get(method, method)


def load_name(level: Level) -> str:
    """Requests in flight, or the whole load where a rate is part of it."""
    return str(level.concurrency) if level.steady else level.load


def level_name(level: Level, levels: Sequence[Level]) -> str:
    """The load, with its workload where there is more than one."""
    several = len({other.workload for other in levels}) > 1
    return f"{level.workload}, {load_name(level)}" if several else load_name(level)


def _load_label(levels: Sequence[Level]) -> str:
    return "Concurrency" if all(level.steady for level in levels) else "Load"


def length_cell(level: Level) -> Cell:
    """Acceptance length under load; a dash where nothing was drafted or the text means nothing."""
    return number(level.acceptance_length, 2)


def grouped(levels: Iterable[Level], *keys: str) -> dict[tuple, list[Level]]:
    """Levels by the values of some attributes, in the order of the levels."""
    found: dict[tuple, list[Level]] = {}
    for level in levels:
        found.setdefault(tuple(getattr(level, key) for key in keys), []).append(level)
    return found


def serving_tables(levels: Sequence[Level], price: float | None = None, gpus: int = 1) -> list[Table]:
    """Every table, one with all measures for each method and draft length.

    Args:
        levels: measured.
        price: per GPU and hour; None leaves cost out.
        gpus: that serve, where the levels do not say.
    """
    tables = [_measures_table(method, K, own) for (method, K), own in grouped(levels, "method", "K").items()]
    tables += means_tables(levels)
    tables.append(_load_table(levels))
    return tables if price is None else [*tables, cost_table(levels, price, gpus)]


def _measures_table(method: str, K: int, levels: Sequence[Level]) -> Table:
    rows = [
        {
            "Measure": _label(key),
            _load_label(levels): level_name(level, levels),
            "Baseline": Cell(MEASURE[key].text(baseline)),
            NAMES[method]: Cell(MEASURE[key].text(value)),
            "Change (%)": change_cell(level.changes[key], level.reached),
        }
        for level in levels
        for key, (baseline, value) in level.values.items()
    ]
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
    return table(f"{series_name(method, K)}: same prompts as the baseline", rows, note)


def wide_table(title: str, levels: Sequence[Level]) -> Table:
    """A row for every level of every method, the baseline's first, and a column for every measure."""
    rows: list[dict[str, Any]] = []
    for (workload, _), own in grouped(levels, "workload", "load").items():
        first = own[0]
        for series, side, level in [(BASELINE, 0, first), *((series_name(x.method, x.K), 1, x) for x in own)]:
            reached = (
                "yes" if level.reached else f"no: {level.running[level.method if side else BASELINE]:.1f} in flight"
            )
            row = {
                "Workload": workload,
                "Load": load_name(level),
                "Method": NAMES[series],
                "Reached": reached,
            }
            for key, values in level.values.items():
                change = change_cell(level.changes[key]) if side else Cell("")
                text = f"{MEASURE[key].text(values[side])} {change.text}".strip()
                row[_label(key)] = Cell(text, change.tone)
            rows.append(row | {"Acceptance length": length_cell(level) if side else None})
    note = (
        "Beside each value its change against the baseline in per cent, positive = better, with its 95 % interval by "
        "paired bootstrap over prompts."
    )
    return table(title, rows, note)


def means_tables(levels: Sequence[Level], *, only_reached: bool = True) -> list[Table]:
    """Geometric means over concurrency for every workload, method and draft length, with the worst level."""
    tables = []
    for (workload, method, K), own in grouped(levels, "workload", "method", "K").items():
        rows = []
        for mean in geometric_means(own, only_reached=only_reached):
            tone = "better" if mean.better == mean.levels else "worse" if mean.worse == mean.levels else "unresolved"
            rows.append(
                {
                    "Measure": _label(mean.measure.key),
                    "Baseline": Cell(mean.measure.text(mean.values[0])),
                    NAMES[method]: Cell(mean.measure.text(mean.values[1])),
                    "Change (%)": Cell(f"{100 * mean.change:+.1f}", tone),  # type: ignore[arg-type]
                    "Worst at": mean.worst.concurrency,
                    "Change there (%)": change_cell(mean.worst.changes[mean.measure.key], mean.worst.reached),
                    "Better / worse": Cell(f"{mean.better} / {mean.worse} of {mean.levels}"),
                }
            )
        note = (
            f"Over the loads of fixed concurrency{' that were reached' * only_reached}. A mean says nothing of the "
            "worst level, so that stands beside it; the mean is coloured only when every level is resolved the same "
            "way."
        )
        title = f"Geometric means over concurrency: {series_name(method, K)}, {workload} prompts"
        tables += [table(title, rows, note)] if rows else []
    return tables


def _load_table(levels: Sequence[Level]) -> Table:
    rows = [
        {
            "Method": series_name(level.method, level.K),
            f"{_load_label(levels)} requested": level_name(level, levels),
            "Running, baseline": number(level.running[BASELINE], 1),
            "Running, method": number(level.running[level.method], 1),
            "Reached": Cell("yes") if level.reached else Cell("not reached", "unresolved"),
            "Paired prompts": level.pairs,
            "Failed": level.failed,
            "Acceptance length": length_cell(level),
        }
        for level in levels
    ]
    return table("Load", rows)


def cost_table(levels: Sequence[Level], price: float, gpus: int = 1) -> Table:
    """Cost of tokens and of requests at every level.

    Args:
        levels: measured.
        price: per GPU and hour.
        gpus: that serve, where the levels do not say.
    """
    rows = []
    for level in levels:
        costs = [cost_per_million(price, level.gpus or gpus, v) for v in level.values[THROUGHPUT.key]]
        # Of every million output tokens, one request takes as many as it has.
        each = [cost * level.tokens_per_request / 1e6 for cost in costs]
        rows.append(
            {
                "Method": series_name(level.method, level.K),
                _load_label(levels): level_name(level, levels),
                "Baseline": number(costs[0], 3),
                "Method's cost": number(costs[1], 3),
                "Change (%)": change_cell(level.changes[THROUGHPUT.key], level.reached),
                "Request, baseline": number(each[0], 6),
                "Request, method": number(each[1], 6),
                "Requests per hour": Cell(f"{price * (level.gpus or gpus) / each[1]:,.0f}"),
            }
        )
    served = " or ".join(map(str, sorted({level.gpus or gpus for level in levels})))
    note = (
        f"{price:g} per GPU and hour × {served} GPU(s), in the currency of the price; all costs on output tokens, of a "
        "request at the mean response length. The change is that of throughput, which is the inverse of cost: positive "
        "= cheaper."
    )
    if any(level.K == 0 for level in levels):
        note += " An endpoint is priced as if it ran on as many."
    return table("Cost per 1M output tokens and per request", rows, note)


def groups(frame: pd.DataFrame, keys: list[str]) -> list[tuple[tuple[Any, ...], pd.DataFrame]]:
    """Rows by the values of several columns, in order of appearance."""
    return [(tuple(key), own) for key, own in frame.groupby(keys, sort=False)]


def acceptance_under_load(runs: pd.DataFrame) -> Table | None:
    """Acceptance by workload, method and K from the servers' counters; None where nothing meaningful was drafted."""
    drafted = runs[(runs["drafts"] > 0) & ~runs["throughput_only"].astype(bool)]
    rows: list[dict[str, Any]] = []
    for (workload, method, K), own in groups(drafted, ["workload", "arm", "k"]):
        by_load = [acceptance_length(level["drafts"], level["accepted"]) for _, level in own.groupby("load")]
        counts = np.stack([np.asarray(at, float)[:K] for at in own["accepted_at"]])
        positions = acceptance_by_position(own["drafts"], counts)
        rows.append(
            {
                "Workload": workload,
                "Method": NAMES[method],
                "K": K,
                "Rate (%)": number(100 * acceptance_rate(own["proposed"], own["accepted"]), 1),
                "Length": acceptance_length(own["drafts"], own["accepted"]),
                "Least to most over loads": Cell(f"{min(by_load):.2f} – {max(by_load):.2f}"),
            }
            | {f"Position {i + 1} (%)": number(100 * value, 1) for i, value in enumerate(positions.unconditional)}
        )
    note = "Length: 1 + accepted / drafts, bonus token included, pooled over loads. It grows with K by construction."
    return table("Acceptance under load", rows, note) if rows else None


def draft_length_table(levels: Sequence[Level]) -> Table | None:
    """Every draft length of a method beside the one before; None where there is one only."""
    rows: list[dict[str, Any]] = []
    for (workload, method), own in grouped(levels, "workload", "method").items():
        means: dict[int, dict[str, float]] = {}
        for (K,), same in sorted(grouped(own, "K").items()):
            best = max(same, key=lambda level: level.values[THROUGHPUT.key][1])
            means[K] = {key: geometric_mean([level.values[key][1] for level in same]) for key in best.values}
            row = {"Workload": workload, "Method": NAMES[method], "K": K}
            row["Highest output tok/s"] = Cell(f"{best.values[THROUGHPUT.key][1]:.1f} at {load_name(best)}")
            rows.append(row | {_label(key): Cell(MEASURE[key].text(value)) for key, value in means[K].items()})
        for low, high in pairwise(means):
            row = {"Workload": workload, "Method": f"K = {high} against {low}", "K": None}
            for key, before in means[low].items():
                better = means[high][key] / before if MEASURE[key].rate else before / means[high][key]
                row[_label(key)] = Cell(f"{100 * better - 100:+.1f} %")
            rows.append(row)
    if all(row["K"] is not None for row in rows):
        return None
    note = "Geometric means over the loads. Against the shorter draft: positive = better."
    return table("Draft lengths beside each other", rows, note)


def _label(key: str) -> str:
    return f"{MEASURE[key].label} ({MEASURE[key].unit})"


def limits_table(levels: Sequence[Level], limits_ms: Sequence[float], price: float | None = None) -> Table | None:
    """The fastest measured method whose P95 TPOT keeps each limit, and the fastest of all; None without such times."""
    levels = [level for level in levels if "tpot_p95" in level.values and level.reached]
    rows: list[dict[str, Any]] = []
    for limit in (*limits_ms, np.inf):
        keep = [level for level in levels if 1e3 * level.values["tpot_p95"][1] <= limit]
        asked = f"TPOT P95 under {limit:g} ms" if np.isfinite(limit) else "highest throughput"
        if not keep:
            rows.append({"Wanted": asked, "Method": "none measured"})
            continue
        best = max(keep, key=lambda level: level.values[THROUGHPUT.key][1])
        speed = best.values[THROUGHPUT.key][1]
        cost = (
            {} if price is None else {"Per 1M output tokens": number(cost_per_million(price, best.gpus or 1, speed), 3)}
        )
        rows.append(
            {
                "Wanted": asked,
                "Method": series_name(best.method, best.K),
                "Workload": best.workload,
                "Load": load_name(best),
                "TPOT, P95 (ms)": number(1e3 * best.values["tpot_p95"][1], 2),
                "Output tok/s": number(speed, 1),
                "Against the baseline (%)": best.changes[THROUGHPUT.key],
            }
            | cost
        )
    note = "Of the levels measured and reached; the baseline without speculation is not among them."
    return table("What keeps a service level", rows, note) if levels and limits_ms else None


_MATRICES: dict[str, Callable[[Level], Cell]] = {
    "Output throughput against the baseline (%)": lambda at: change_cell(at.changes[THROUGHPUT.key], at.reached),
    "Acceptance length": length_cell,
    "TTFT against the baseline (%)": lambda at: change_cell(
        at.changes[next(key for key in at.changes if key.startswith("ttft"))], at.reached
    ),
}


def matrix_tables(levels: Sequence[Level]) -> list[Table]:
    """Workload × load, relative to the baseline; empty with a single workload."""
    if len({level.workload for level in levels}) < 2:
        return []
    tables = []
    for (method, K), own in grouped(levels, "method", "K").items():
        for title, cell in _MATRICES.items():
            if title.startswith("TTFT") and not any(key.startswith("ttft") for key in own[0].changes):
                continue
            rows = [
                {"Workload": workload} | {load_name(level): cell(level) for level in here}
                for (workload,), here in grouped(own, "workload").items()
            ]
            tables.append(table(f"{title}: {series_name(method, K)}", rows))
    return tables


def memory_table(runs: pd.DataFrame) -> Table | None:
    """GPU memory and KV cache that a head takes away; None where the runs do not say."""
    labels = {
        "kv_cache_tokens": ("KV cache (tokens)", ",.0f"),
        "weights_gib": ("Weights (GiB)", ".2f"),
        "prefix_hit_rate": ("Prefix-cache hits of conversations (%)", ".1f"),
    }
    columns = [column for column in labels if column in runs and runs[column].fillna(0).any()]
    if not columns:
        return None
    found = runs.groupby(["arm", "k"], sort=False)[columns].mean()
    baseline = found.xs(BASELINE, level="arm").iloc[0] if BASELINE in found.index.get_level_values("arm") else None
    rows = []
    for (method, K), (_, values) in zip(found.index.tolist(), found.iterrows(), strict=True):
        row: dict[str, Any] = {"Method": series_name(method, K)}
        for column in columns:
            name, form = labels[column]
            relative = (
                np.nan if baseline is None or method == BASELINE else 100 * (values[column] / baseline[column] - 1)
            )
            row[name] = Cell(format(values[column], form) if np.isfinite(values[column]) else "–")
            row[f"{name.split(' (')[0]} against the baseline (%)"] = Cell(
                f"{relative:+.1f}" if np.isfinite(relative) else "–"
            )
        rows.append(row)
    note = (
        "What the server says after its start, and of conversations. Fewer tokens in the KV cache mean "
        "fewer requests at once, fewer hits a longer wait for the first token."
    )
    return table("Memory and cache", rows, note)


# Serving figures without a comparison: what a plan will do, what another tool's file says.

_MEDIANS: list[Measure] = [measure for key, measure in MEASURE.items() if key.endswith("_p50")]


def plan_table(plan: Plan, preset: Preset | None = None) -> Table:
    """Servers in the order they start, and what each is sent."""
    rows = [
        {
            "Server": NAMES[run.method],
            "K": str(run.k),
            "GPUs": str(run.tensor_parallel),
            "Flags": " ".join(run.flags),
            "Workloads": ", ".join(dict.fromkeys(level.workload.name for level in run.levels)),
            "Loads": ", ".join(dict.fromkeys(level.load.name for level in run.levels)),
            "Prompts, at most": sum(level.prompts for level in run.levels),
        }
        for run in plan.runs
    ]
    notes = [preset.note] if preset else []
    notes += [f"Left out: {reason}." for reason in plan.skipped]
    return table(preset.title if preset else "Plan", rows, " ".join(notes))


def imported_table(levels: Sequence[Sequence[ImportedLevel]]) -> Table:
    """Levels of other tools' files, by our formulas and beside what the tool itself printed."""
    rows = [
        {
            "Tool": level.tool,
            "Level": level.name,
            "Requests": len(level.requests),
            "Failed": level.failed,
            "Output tok/s": number(level.output_tokens_per_s, 1),
        }
        | {f"{m.label} (ms)": number(1e3 * level.requests[m.column].median(), 1) for m in _MEDIANS}
        | {"Its own medians (ms)": Cell(", ".join(f"{k} {v:.1f}" for k, v in level.stated.items()) or "–")}
        for file in levels
        for level in file
    ]
    return table("Imported results", rows, formulas())


def formulas() -> str:
    """What every time means."""
    return "; ".join(f"{m.label.split(',')[0]}: {FORMULAS[m.column]}" for m in _MEDIANS) + "."
