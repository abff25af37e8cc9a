"""Tables of the offline measurement: acceptance by workload, position and condition, and whether text changed."""

from collections.abc import Sequence
from typing import Any

import pandas as pd

from drafthead.config.evaluation import ALL
from drafthead.evaluation.reporting.tables import Table, interval_text, number, percent_text, percents, table
from drafthead.evaluation.results.summary import AcceptanceSummary, MethodAcceptance
from drafthead.evaluation.workload import BASELINE_AGAIN, NAMES


def acceptance_tables(summary: AcceptanceSummary) -> list[Table]:
    """Every table of the main condition; whether responses stayed the same is tested for greedy ones only."""
    tables = [_lengths(summary), _positions(summary)]
    return [*tables, _lossless(summary)] if summary.identical else tables


def _lengths(summary: AcceptanceSummary) -> Table:
    note = (
        f"{summary.prompts - summary.looping} of {summary.prompts} held-out prompts; {summary.looping} left out "
        f"because the baseline's own response loops (over 10 % of its 8-grams repeat), where acceptance means little. "
        f"{summary.ended:.0%} of the baseline's responses end by themselves. Brackets: 95 % bootstrap over prompts. "
        "Tokens per step counts steps without a draft too."
    )
    entries = sorted(summary.methods, key=lambda m: (m.category != ALL, m.category))
    if len({m.K for m in entries}) > 1:
        note += " Acceptance length grows with K by construction: compare at equal K."
    rows = [
        {
            "Workload": m.category, "Method": NAMES[m.method], "K": m.K, "Prompts": m.prompts,
            "Acceptance length (tokens)": m.length, "Rate (%)": number(100 * m.rate, 1),
            "Tokens per step": m.tokens_per_step,
        }
        for m in entries
    ]  # fmt: skip
    return table(f"Acceptance length, T = {summary.temperature:g}", rows, note)


def _positions(summary: AcceptanceSummary) -> Table:
    rows = [
        {"Method": NAMES[m.method], "Share of": kind}
        | {f"Position {k + 1} (%)": number(100 * value, 1) for k, value in enumerate(values)}
        for m in summary.methods
        if m.category == ALL
        for kind, values in (
            ("all drafts", m.positions.unconditional),
            ("given the one before", m.positions.conditional),
        )
    ]
    return table("Acceptance by draft position", rows)


def _lossless(summary: AcceptanceSummary) -> Table:
    rows = [{"Method": NAMES[m], "Identical (%)": percent_text(share)} for m, share in summary.identical.items()]
    note = (
        "All held-out prompts. Greedy decoding; rounding differs with the batch, so the noise floor may be below 100 %."
    )
    return table("Responses identical to the baseline", rows, note)


def conditions_table(entries: Sequence[MethodAcceptance]) -> Table:
    """Acceptance by method, K, temperature and effort, all workloads pooled."""
    rows: list[dict[str, Any]] = [
        _setting(e)
        | {
            "Prompts": e.prompts,
            "Acceptance length": e.length,
            "Rate (%)": number(100 * e.rate, 1),
            "By position (%)": percents(e.positions.unconditional),
            "Given the one before (%)": percents(e.positions.conditional),
            "Accepted 0…K (%)": percents(e.histogram),
            "Identical (%)": percent_text(e.identical) if e.identical else None,
        }
        for e in entries
        if e.category == ALL
    ]
    note = (
        "Acceptance length is 1 + accepted / drafts, in tokens, and grows with K by construction: compare at equal K. "
        "Given the one before: among drafts that proposed a token there. Identical: greedy responses equal to the "
        f"baseline's of the setting; `{NAMES[BASELINE_AGAIN]}` is the floor. Brackets: 95 % bootstrap over prompts."
    )
    return table("Acceptance side by side", rows, note)


def workloads_table(entries: Sequence[MethodAcceptance]) -> Table:
    """Acceptance length of every condition, a column for each workload."""
    shown = [e for e in entries if e.category != ALL and e.method != BASELINE_AGAIN]
    rows = [_setting(e) | {"workload": e.category, "length": interval_text(e.length)} for e in shown]
    long = pd.DataFrame(rows, columns=["Method", "K", "T", "Effort", "workload", "length"])
    wide = long.pivot_table("length", ["Method", "K", "T", "Effort"], "workload", aggfunc="first", sort=False)
    return Table("Acceptance length by workload", wide.reset_index().astype(object))


def _setting(e: MethodAcceptance) -> dict[str, Any]:
    return {"Method": NAMES[e.method], "K": str(e.K), "T": f"{e.temperature:g}", "Effort": e.effort}
