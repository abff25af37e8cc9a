"""One page of the report: which head served when, why it was replaced, and the figures behind each step."""

from datetime import UTC, datetime
from pathlib import Path

from drafthead.adapting.loop import Loop
from drafthead.evaluation.reporting.report import Report, Section, write_pages
from drafthead.evaluation.reporting.tables import Cell, table
from drafthead.statistics import Interval

_SHOWN = ("event", "head", "why")


def write_history(loop: Loop) -> Path:
    """Write results/NAME/adapting/report.html and report.md, in which no captured text stands; returns the first."""
    events = loop.state.history
    changes = []
    for event in [event for event in events if event["event"] == "drift"][-1:]:
        for row in event["changed"]:
            measured = {key.replace("_", " "): pair for key, pair in row.items() if key != "workload"}
            for key, (old, new) in measured.items():
                changes.append({"what": f"{row['workload']}: {key}", "before": _cell(old), "after": _cell(new)})
        changes.append({"what": "tokens: distance in bits", "after": _cell(event["token_distance"])})
    gains = [
        {"candidate": event["head"], "workload": name, "gain (tokens)": Interval(**gain)}
        for event in events
        for name, gain in event.get("gains", {}).items()
    ]
    tables = [
        table("What happened", [{"time (UTC)": _time(e["at"])} | {key: e[key] for key in _SHOWN} for e in events]),
        *([table("What changed at the last drift", changes)] if changes else []),
        *([table("Acceptance length of each candidate, less that of the head in service", gains)] if gains else []),
    ]
    report = Report(
        title=f"Adapting {loop.recipe.name}",
        question="Which head served when, and why it was replaced.",
        headline=f"in service: {loop.served.name}, since {_time(loop.served.since)}",
        facts=[("Target", loop.recipe.target.path), ("Phase", loop.state.phase), ("Trainings", str(loop.state.cycle))],
        sections=[Section("History", tables, [])],
        caveats=[],
    )
    return write_pages(report, loop.recipe.results_dir / "adapting")


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")


def _cell(value: float | None) -> Cell:
    return Cell("-" if value is None else f"{value:g}")
