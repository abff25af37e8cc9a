"""Tables of the measurement under load: every level, geometric means, acceptance, matrices, memory and cost."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from drafthead.evaluation.comparison import FEWEST_PROMPTS
from drafthead.evaluation.decision.cost import cost_per_million
from drafthead.evaluation.measuring.plan import Plan
from drafthead.evaluation.measuring.presets import Preset
from drafthead.evaluation.reporting.tables import Cell, Table, Tone, change_cell, number, table
from drafthead.evaluation.results.levels import MEASURE, THROUGHPUT, Level, geometric_means
from drafthead.evaluation.workload import BASELINE, NAMES
from drafthead.statistics import acceptance_by_position, acceptance_length, acceptance_rate


def series_name(method: str, K: int) -> str:
    """A method at a draft length, as every table and plot names it."""
    return f"{NAMES[method]}, K = {K}" if K else NAMES[method]


def load_name(level: Level) -> str:
    """Requests in flight, or the whole load where a rate is part of it."""
    return str(level.concurrency) if level.steady else level.load


def label_of(key: str) -> str:
    """A measure with its unit."""
    return f"{MEASURE[key].label} ({MEASURE[key].unit})"


def grouped(levels: Iterable[Level], *keys: str) -> dict[tuple, list[Level]]:
    """Levels by the values of some attributes, in the order of the levels."""
    found: dict[tuple, list[Level]] = {}
    for level in levels:
        found.setdefault(tuple(getattr(level, key) for key in keys), []).append(level)
    return found


def levels_table(title: str, levels: Sequence[Level]) -> Table:
    """A row for every level of every method, the baseline's first, and a column for every measure."""
    rows: list[dict[str, Any]] = []
    for (workload, _), own in grouped(levels, "workload", "load").items():
        for side, level in [(0, own[0]), *((1, level) for level in own)]:
            name = (BASELINE, level.method)[side]
            row: dict[str, Any] = {
                "Workload": workload,
                "Load": load_name(level),
                "Method": (NAMES[BASELINE], series_name(level.method, level.K))[side],
                "Reached": "yes" if level.reached else f"no: {level.running[name]:.1f} ran",
                "Prompts": level.pairs,
                "Failed": level.failed if side else None,
            }
            for key, values in level.values.items():
                change = change_cell(level.changes[key], level.reached) if side else Cell("")
                row[label_of(key)] = Cell(f"{MEASURE[key].text(values[side])} {change.text}".strip(), change.tone)
            rows.append(row | {"Acceptance length": level.acceptance_length if side else None})
    note = (
        "Beside each value its change against the baseline in per cent, positive = better, for times baseline / method "
        "− 1; brackets: 95 % paired bootstrap over prompts, with what blocks of server starts differ by. Grey: the "
        f"interval includes zero, or there is none: fewer than {FEWEST_PROMPTS} prompts, or requests that waited "
        "together. ITL is the gap between chunks, and a chunk of a speculative server carries several tokens: it gets "
        "worse by design; TPOT is per token."
    )
    if any(not level.steady for level in levels):
        note += (
            " At a request rate (r…) throughput is what was sent, whoever serves: times tell methods apart, and the "
            "verdict leaves such loads out."
        )
    return table(title, rows, note)


def brief_table(levels: Sequence[Level], decisions: dict[tuple[str, str, int, int], str] | None = None) -> Table:
    """What an operator pays and a user waits for at every load.

    Args:
        levels: measured.
        decisions: (workload, method, K, concurrency) -> the verdict there.
    """
    rows: list[dict[str, Any]] = []
    for level in levels:
        baseline, method = level.values[THROUGHPUT.key]
        row = {
            "Workload": level.workload,
            "Load": load_name(level),
            "Method": series_name(level.method, level.K),
            "Output tok/s": Cell(f"{baseline:.1f} → {method:.1f}"),
            "Change (%)": change_cell(level.changes[THROUGHPUT.key], level.reached),
            "Median latency (%)": change_cell(level.changes["e2e_p50"], level.reached),
            "Acceptance length": level.acceptance_length,
        }
        if decisions is not None:
            at = (level.workload, level.method, level.K, level.concurrency)
            row["Verdict"] = Cell(decisions.get(at, "not in the traffic"))
        rows.append(row)
    note = "Positive = better everywhere; brackets: 95 % paired bootstrap over prompts; grey: unresolved."
    return table("Serving with drafts, against no speculation", rows, note)


def means_table(levels: Sequence[Level], *, only_reached: bool = True) -> Table | None:
    """Geometric means over concurrency of every workload, method and draft length, with the worst level beside each.

    None where no method has two loads of fixed concurrency.
    """
    rows: list[dict[str, Any]] = []
    for (workload, method, K), own in grouped(levels, "workload", "method", "K").items():
        best = max(own, key=lambda level: level.values[THROUGHPUT.key][1])
        peak = Cell(f"{best.values[THROUGHPUT.key][1]:.1f} at {load_name(best)}")
        row: dict[str, Any] = {"Workload": workload, "Method": series_name(method, K), "Highest output tok/s": peak}
        means = geometric_means(own, only_reached=only_reached)
        for mean in means:
            before, after = map(mean.measure.text, mean.values)
            worst = f"worst {100 * mean.worst.change(mean.measure):+.1f} at {mean.worst.concurrency}"
            tone: Tone = (
                "better" if mean.better == mean.levels else "worse" if mean.worse == mean.levels else "unresolved"
            )
            row[label_of(mean.measure.key)] = Cell(f"{before} → {after} {100 * mean.change:+.1f} ({worst})", tone)
        rows += [row] if means else []
    note = (
        f"Baseline → method, the change in per cent (positive = better) and the worst level, over the loads of fixed "
        f"concurrency{' that were reached' * only_reached}; coloured only when every level is resolved the same way."
    )
    return table("Geometric means over concurrency", rows, note) if rows else None


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
                "Workload": level.workload,
                "Load": load_name(level),
                "Method": series_name(level.method, level.K),
                "1M tokens": Cell(f"{costs[0]:.3f} → {costs[1]:.3f}"),
                "Request": Cell(f"{each[0]:.6f} → {each[1]:.6f}"),
                "Requests per hour": Cell(f"{price * (level.gpus or gpus) / each[1]:,.0f}"),
                "Change (%)": change_cell(level.changes[THROUGHPUT.key], level.reached),
            }
        )
    note = (
        f"Baseline → method, at {price:g} per GPU and hour in the currency of the price; all costs on output tokens. "
        "The change is that of throughput, the inverse of cost. An endpoint is priced as if it ran on as many GPUs."
    )
    return table("Cost per 1M output tokens and per request", rows, note)


def acceptance_under_load(runs: pd.DataFrame) -> Table | None:
    """Acceptance by workload, method and K from the servers' counters; None where nothing meaningful was drafted."""
    drafted = runs[(runs["drafts"] > 0) & ~runs["throughput_only"].astype(bool)]
    rows: list[dict[str, Any]] = []
    for (workload, method, K), own in drafted.groupby(["workload", "arm", "k"], sort=False):
        by_load = [acceptance_length(level["drafts"], level["accepted"]) for _, level in own.groupby("load")]
        counts = np.stack([np.asarray(at, float)[:K] for at in own["accepted_at"]])
        positions = acceptance_by_position(own["drafts"], counts).unconditional
        rows.append(
            {
                "Workload": workload,
                "Method": NAMES[str(method)],
                "K": K,
                "Rate (%)": number(100 * acceptance_rate(own["proposed"], own["accepted"]), 1),
                "Length": acceptance_length(own["drafts"], own["accepted"]),
                "Least to most over loads": Cell(f"{min(by_load):.2f} – {max(by_load):.2f}"),
            }
            | {f"Position {i + 1} (%)": number(100 * value, 1) for i, value in enumerate(positions)}
        )
    note = "Length: 1 + accepted / drafts, bonus token included, pooled over loads. It grows with K by construction."
    return table("Acceptance under load", rows, note) if rows else None


def limits_table(levels: Sequence[Level], limits_ms: Sequence[float]) -> Table | None:
    """The fastest measured method whose P95 TPOT keeps each limit, and the fastest of all; None without such times."""
    levels = [level for level in levels if "tpot_p95" in level.values and level.reached]
    rows: list[dict[str, Any]] = []
    for limit in (*limits_ms, np.inf):
        keep = [level for level in levels if 1e3 * level.values["tpot_p95"][1] <= limit]
        row = {"Wanted": f"TPOT P95 under {limit:g} ms" if np.isfinite(limit) else "highest throughput"}
        if not keep:
            rows.append(row | {"Method": "none measured"})
            continue
        best = max(keep, key=lambda level: level.values[THROUGHPUT.key][1])
        rows.append(
            row
            | {
                "Method": series_name(best.method, best.K),
                "Workload": best.workload,
                "Load": load_name(best),
                "TPOT, P95 (ms)": number(1e3 * best.values["tpot_p95"][1], 2),
                "Output tok/s": number(best.values[THROUGHPUT.key][1], 1),
                "Against the baseline (%)": best.changes[THROUGHPUT.key],
            }
        )
    note = "Of the levels measured and reached; the baseline without speculation is not among them."
    return table("What keeps a service level", rows, note) if levels and limits_ms else None


def matrix_tables(levels: Sequence[Level]) -> list[Table]:
    """Workload × load, relative to the baseline: throughput, acceptance, TTFT; empty with a single workload."""
    if len({level.workload for level in levels}) < 2:
        return []
    ttft = next((key for key in levels[0].changes if key.startswith("ttft")), None)
    cells: dict[str, Callable[[Level], Any]] = {
        "Output throughput against the baseline (%)": lambda at: change_cell(at.changes[THROUGHPUT.key], at.reached),
        "Acceptance length": lambda at: at.acceptance_length,
    }
    if ttft:
        cells["TTFT against the baseline (%)"] = lambda at: change_cell(at.changes[ttft], at.reached)
    return [
        table(
            f"{title}: {series_name(method, K)}",
            [
                {"Workload": workload} | {load_name(level): cell(level) for level in here}
                for (workload,), here in grouped(own, "workload").items()
            ],
        )
        for (method, K), own in grouped(levels, "method", "K").items()
        for title, cell in cells.items()
    ]


_MEMORY = {
    "kv_cache_tokens": ("KV cache (tokens)", ",.0f"),
    "weights_gib": ("Weights (GiB)", ".2f"),
    "prefix_hit_rate": ("Prefix-cache hits of conversations (%)", ".1f"),
}


def memory_table(runs: pd.DataFrame) -> Table | None:
    """GPU memory, KV cache and prefix-cache hits that a head takes away; None where the runs do not say."""
    columns = [column for column in _MEMORY if column in runs and runs[column].fillna(0).any()]
    if not columns:
        return None
    found = runs.groupby(["arm", "k"], sort=False)[columns].mean()
    baseline = found.xs(BASELINE, level="arm").iloc[0] if BASELINE in found.index.get_level_values("arm") else np.nan
    relative = (100 * (found / baseline - 1)).drop(index=BASELINE, level="arm", errors="ignore").reindex(found.index)
    rows = []
    for method, K in found.index:
        row: dict[str, Any] = {"Method": series_name(method, K)}
        for column in columns:
            name, form = _MEMORY[column]
            value, change = found.loc[(method, K), column], relative.loc[(method, K), column]
            row[name] = Cell(format(value, form) if np.isfinite(value) else "–")
            row[f"{name.split(' (')[0]} against the baseline (%)"] = Cell(
                f"{change:+.1f}" if np.isfinite(change) else "–"
            )
        rows.append(row)
    note = (
        "What the server says after its start, and of conversations. Fewer tokens in the KV cache mean "
        "fewer requests at once, fewer hits a longer wait for the first token."
    )
    return table("Memory and cache", rows, note)


def plan_table(plan: Plan, preset: Preset | None = None) -> Table:
    """Servers in the order they start, and what each is sent."""
    rows = [
        {
            "Server": series_name(run.method, run.k),
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
