"""Tables of both measurements: acceptance offline; under load every level, geometric means, matrices, memory, cost."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from drafthead.config.evaluation import ALL, CONVERSATIONS
from drafthead.evaluation.columns import SETTING, LevelKey, level_key, setting_title
from drafthead.evaluation.measuring.plan import ServePlan
from drafthead.evaluation.measuring.presets import Preset
from drafthead.evaluation.reporting.tables import Cell, Table, Tone, change_cell, length_cell, note, number, table
from drafthead.evaluation.results.levels import (
    MEASURE,
    THROUGHPUT,
    LoadComparison,
    cost_per_million,
    geometric_means,
    grouped,
)
from drafthead.evaluation.results.summary import FIRST_BIN, AcceptanceSummary, MethodAcceptance, PlaceAcceptance
from drafthead.evaluation.workload import BASELINE, MethodNames
from drafthead.statistics import FEWEST_PROMPTS, acceptance_length, acceptance_length_interval

FLOOR = "baseline again (noise floor)"
_HARDLY = 1.1  # tokens a round
_TONES: dict[int, Tone] = {1: "better", 0: "unresolved", -1: "worse"}


# Offline.


def acceptance_table(summary: AcceptanceSummary, names: MethodNames) -> Table:
    """The main condition: every method on every workload, all prompts first."""
    kept = summary.prompts - summary.looping
    text = note("acceptance", kept=kept, prompts=summary.prompts, looping=summary.looping, ended=summary.ended)
    if again := summary.identical.get(BASELINE):
        text += " " + note("floor", again=number(again.scaled(100)).text)
    text += hardly_accepted(summary, names)
    by_category = sorted(summary.methods, key=lambda m: (m.category != ALL, m.category))
    return conditions_table(by_category, names, f"{text} ")


def hardly_accepted(summary: AcceptanceSummary, names: MethodNames) -> str:
    """What to look for where hardly a draft is accepted, after a space; empty where no method is so."""
    pooled = (m for m in summary.methods if m.category == ALL and m.prompts >= FEWEST_PROMPTS)
    weak = ", ".join(sorted({names[m.method] for m in pooled if m.length.value < _HARDLY}))
    return " " + note("hardly", names=weak) if weak else ""


def conditions_table(entries: Sequence[MethodAcceptance], names: MethodNames, before: str = "") -> Table:
    """Acceptance by workload, method, K, temperature and effort."""
    rows = [
        {
            "Workload": e.category,
            "Method": names[e.method] if e.method != BASELINE else FLOOR,
            "K": str(e.K),
            "T": f"{e.temperature:g}",
            "Effort": e.effort,
            "Prompts": e.prompts,
            "Acceptance length": length_cell(e.length, e.prompts),
            "Rate (%)": number(100 * e.rate),
            "Tokens per step": e.tokens_per_step,
            "By position (%)": number(100 * e.unconditional),
            "Given the one before (%)": number(100 * e.conditional),
            "Identical (%)": number(e.identical.scaled(100)) if e.identical else None,
        }
        for e in entries
    ]
    return table("Acceptance length", rows, before + note("conditions"))


def places_table(places: Sequence[PlaceAcceptance], names: MethodNames) -> Table | None:
    """Acceptance by length of the prompt, and by place in response and text; None where no method always drafts."""
    rows = [
        {
            "Method": names[at.method],
            "K": str(at.K),
            "Of": at.place,
            "Tokens": f"{at.first} to {max(2 * at.first, FIRST_BIN) - 1}",
            "Prompts": at.prompts,
            "Acceptance length": length_cell(at.length, at.prompts),
        }
        for at in places
    ]
    return table("Acceptance by position", rows, note("places")) if rows else None


# Under load.


def _which(level: LoadComparison, names: MethodNames) -> dict[str, Any]:
    method = names.at(level.key.method, level.key.K)
    return {"Workload": level.key.workload_title, "Load": level.key.load_name, "Method": method}


def _length(level: LoadComparison, *, bounds: bool = True) -> Cell:
    length = level.acceptance_length if bounds else level.acceptance_length.value
    return length_cell(length, int((level.paired["drafts_head"] > 0).sum()))


def levels_table(title: str, levels: Sequence[LoadComparison], names: MethodNames) -> Table:
    """A row for every level of every method, the baseline's first, and a column for every measure."""
    rows: list[dict[str, Any]] = []
    for own in grouped(levels, "setting", "load").values():
        for side, level in [(0, own[0]), *((1, level) for level in own)]:
            row = _which(level, names) | ({} if side else {"Method": names[BASELINE]})
            ran = level.running[level.key.method if side else BASELINE]
            row["Reached"] = "yes" if level.reached else f"no: {ran:.1f} ran"
            row |= {"Prompts": len(level.paired), "Failed": level.failed if side else None}
            for key, values in level.values.items():
                value = MEASURE[key].text(values[side])
                change = change_cell(level.changes[key], level.reached, " %")
                row[MEASURE[key].title] = Cell(f"{value}, {change.text}", change.tone) if side else Cell(value)
            row["Response (tokens)"] = _response_cell(level) if side else number(level.response_length[0])
            rows.append(row | {"Acceptance length": _length(level) if side else None})
    text = note("levels", fewest=FEWEST_PROMPTS)
    if other := [level for level in levels if level.length_differs]:
        keys = (level.key for level in other)
        where = (f"{key.workload_title} at {key.load_name} ({names.at(key.method, key.K)})" for key in keys)
        text += " " + note("lengths", where=", ".join(where))
    if any(not level.key.steady for level in levels):
        text += " " + note("rates")
    return table(title, rows, text)


def _response_cell(level: LoadComparison) -> Cell:
    """Mean response length of the method, and by how much it differs from the baseline's where it does."""
    text, longer = number(level.response_length[1]).text, level.longer_by
    if not longer.value:
        return Cell(text)
    return Cell(f"{text}, {longer:+.1f}", "worse" if level.length_differs else "unresolved")


def brief_table(
    levels: Sequence[LoadComparison], names: MethodNames, decisions: dict[tuple[LevelKey, int], str] | None = None
) -> Table:
    """What an operator pays and a user waits for at every load.

    Args:
        levels: measured.
        names: of the methods.
        decisions: (key over all loads, concurrency) -> the verdict there.
    """
    rows = []
    for level in levels:
        row = _which(level, names) | {
            "Output tok/s": _both(level.values[THROUGHPUT.key], ".1f"),
            "Change (%)": change_cell(level.changes[THROUGHPUT.key], level.reached),
            "Median latency": change_cell(level.changes["e2e_p50"], level.reached),
            "Acceptance length": _length(level, bounds=False),
        }
        if decisions is not None:
            row["Verdict"] = Cell(decisions.get((level.key.over_loads, level.key.concurrency), "not in the traffic"))
        rows.append(row)
    return table("Serving with drafts, against no speculation", rows, note("brief", loops=note("loops")))


def _both(values: Iterable[float], form: str) -> Cell:
    """Baseline → method."""
    return Cell(" → ".join(format(value, form) for value in values))


def means_table(levels: Sequence[LoadComparison], names: MethodNames, *, only_reached: bool = True) -> Table | None:
    """Geometric means over concurrency of every workload, method and draft length, with the worst level beside each.

    None where no method has two loads of fixed concurrency.
    """
    rows: list[dict[str, Any]] = []
    for (setting, method, K), own in grouped(levels, "setting", "method", "K").items():
        best = max(own, key=lambda level: level.values[THROUGHPUT.key][1])
        peak = Cell(f"{best.values[THROUGHPUT.key][1]:.1f} at {best.key.load_name}")
        row: dict[str, Any] = {
            "Workload": setting_title(*setting),
            "Method": names.at(method, K),
            "Highest output tok/s": peak,
        }
        means = geometric_means(own, only_reached=only_reached)
        for mean in means:
            before, after = map(mean.measure.text, mean.values)
            worst = f"worst {mean.worst.changes[mean.measure.key].amount()} at {mean.worst.key.concurrency}"
            text = f"{before} → {after}, {mean.change.amount()} ({worst})"
            # No response may have come to its answer.
            row[mean.measure.title] = Cell(text if np.isfinite(mean.change.value) else "–", _TONES[mean.sign])
        rows += [row] if means else []
    text = note("means", reached=" that were reached" * only_reached)
    return table("Geometric means over concurrency", rows, text) if rows else None


def cost_table(levels: Sequence[LoadComparison], names: MethodNames, price: float) -> Table:
    """Cost of tokens and of requests at every level, at a price per GPU and hour."""
    rows = []
    for level in levels:
        costs = [cost_per_million(price, level.key.gpus, speed) for speed in level.values[THROUGHPUT.key]]
        # Of every million output tokens, one request takes as many as it has.
        each = [cost * level.tokens_per_request / 1e6 for cost in costs]
        row = _which(level, names) | {"1M tokens": _both(costs, ".3f"), "Request": _both(each, ".6f")}
        row["Requests per hour"] = Cell(f"{price * level.key.gpus / each[1]:,.0f}")
        row["Change (%)"] = change_cell(level.changes[THROUGHPUT.key], level.reached)
        rows.append(row)
    return table("Cost per 1M output tokens and per request", rows, note("cost", price=price))


def acceptance_under_load(requests: pd.DataFrame, names: MethodNames) -> Table | None:
    """Acceptance by workload, method and K; None where nothing meaningful was drafted, or no server says."""
    rows: list[dict[str, Any]] = []
    drafted = requests[requests["drafts"] > 0]
    for _, own in drafted.groupby([*SETTING, "method", "k"], sort=False):
        key = level_key(own.iloc[0])
        by_load = [acceptance_length(level["drafts"], level["accepted"]) for _, level in own.groupby("load")]
        by_prompt = own.groupby("prompt_id")[["drafts", "accepted"]].sum()
        steps = np.concatenate([*own["accepted_by_step"]])
        row = {"Workload": key.workload_title, "Method": names[key.method], "K": key.K, "Prompts": len(by_prompt)}
        length = acceptance_length_interval(by_prompt["drafts"], by_prompt["accepted"])
        row |= {"Length": length_cell(length, len(by_prompt))}
        row |= {"Least to most over loads": Cell(f"{min(by_load):.2f} – {max(by_load):.2f}")}
        row |= {f"Position {i + 1} (%)": number(100 * np.mean(steps > i)) for i in range(max(key.K, steps.max()))}
        rows.append(row)
    return table("Acceptance under load", rows, note("under load", loops=note("loops"))) if rows else None


def limits_table(levels: Sequence[LoadComparison], names: MethodNames, limits_ms: Sequence[float]) -> Table | None:
    """The fastest measured method whose P95 TPOT keeps each limit, and the fastest of all; None without such times."""
    levels = [level for level in levels if "tpot_p95" in level.values and level.reached]
    rows: list[dict[str, Any]] = []
    for limit in (*limits_ms, np.inf):
        row = {"Wanted": f"TPOT P95 under {limit:g} ms" if np.isfinite(limit) else "highest throughput"}
        keep = [level for level in levels if 1e3 * level.values["tpot_p95"][1] <= limit]
        if keep:
            best = max(keep, key=lambda level: level.values[THROUGHPUT.key][1])
            row |= _which(best, names) | {
                "TPOT, P95 (ms)": number(1e3 * best.values["tpot_p95"][1], 2),
                "Output tok/s": number(best.values[THROUGHPUT.key][1], 1),
                "Against the baseline (%)": best.changes[THROUGHPUT.key],
            }
        rows.append(row)
    return table("What keeps a service level", rows, note("limits")) if levels and limits_ms else None


def matrix_tables(levels: Sequence[LoadComparison], names: MethodNames) -> list[Table]:
    """Workload × load, relative to the baseline: throughput, acceptance, TTFT; empty with a single workload."""
    if len({level.key.setting for level in levels}) < 2:
        return []
    cells: dict[str, Callable[[LoadComparison], Any]] = {
        "Output throughput against the baseline (%)": lambda at: change_cell(at.changes[THROUGHPUT.key], at.reached),
        "Acceptance length": _length,
    }
    if ttft := next((key for key in levels[0].changes if MEASURE[key].column == "ttft_s"), None):
        cells["TTFT against the baseline"] = lambda at: change_cell(at.changes[ttft], at.reached)
    return [
        table(
            f"{title}: {names.at(method, K)}",
            [
                {"Workload": setting_title(*setting)} | {level.key.load_name: cell(level) for level in here}
                for (setting,), here in grouped(own, "setting").items()
            ],
            note("loops") if cell is _length else "",
        )
        for (method, K), own in grouped(levels, "method", "K").items()
        for title, cell in cells.items()
    ]


_MEMORY = {
    "kv_cache_tokens": ("KV cache", " (tokens)", ",.0f"),
    "weights_gib": ("Weights", " (GiB)", ".2f"),
    "hits": ("Prefix-cache hits of conversations", " (%)", ".1f"),
}


def memory_table(runs: pd.DataFrame, names: MethodNames) -> Table | None:
    """GPU memory, KV cache and prefix-cache hits that a head takes away; None where the runs do not say."""
    queries = runs["prefix_queries"].where((runs["workload"] == CONVERSATIONS) & (runs["prefix_queries"] > 0))
    runs = runs.assign(hits=100 * runs["prefix_hits"] / queries)  # prompts that share nothing have no hits to lose
    found = runs.groupby(["method", "k", "tensor_parallel"], sort=False)[list(_MEMORY)].mean()
    known = [column for column in _MEMORY if found[column].fillna(0).any()]
    rows = []
    for (method, K, gpus), values in zip(found.index, found.to_dict("records"), strict=True):
        row: dict[str, Any] = {"Method": names.at(method, K) + f" TP{gpus}" * (gpus > 1)}
        for column in known:
            name, unit, form = _MEMORY[column]
            row[name + unit] = Cell(format(values[column], form) if np.isfinite(values[column]) else "–")
            against = np.nan if method == BASELINE else values[column] / found.loc[(BASELINE, 0, gpus), column]
            row[f"{name} against the baseline (%)"] = number(100 * against - 100, sign="+")
        rows.append(row)
    return table("Memory and cache", rows, note("memory")) if known else None


def plan_table(plan: ServePlan, names: MethodNames, preset: Preset | None = None) -> Table:
    """Servers in the order they start, and what each is sent."""
    rows = [
        {
            "Server": names.at(run.method, run.k),
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
    return table(preset.title if preset else "ServePlan", rows, " ".join(notes))
