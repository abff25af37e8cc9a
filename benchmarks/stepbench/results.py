"""From what the contestants answered to numbers, a table and Markdown.

Speed is the median over rounds with its range. "ours / it" compares within rounds: the median over rounds
of the other's seconds divided by ours. Losses are compared at the first step, where all weights are equal.
"""

from statistics import median

from rich.table import Table

from stepbench.referee import Entry
from stepbench.shapes import Shape, parameters, step_flops

_SHARED = ("range", "ours is faster by", "memory MiB", "ours needs", "share of peak", "over products")
COLUMNS = ("contestant", "tokens/s", *_SHARED, "first loss")
# Drafters but EAGLE-3 are trained on other rows by each trainer, and start from other weights.
ROWS_COLUMNS = ("contestant", "rows/s", *_SHARED, "rows")


def summarise(shape: Shape, drafter: str, entries: list[Entry], peak: float, entropy: float) -> dict:
    """Everything measured, as JSON.

    Args:
        shape: shape that was run.
        drafter: `head.type` of the head that was trained.
        entries: results of all contestants, with or without ours.
        peak: measured FLOP/s of matrix products.
        entropy: mean entropy of the target over the draft vocabulary, which SpecForge's loss includes.
    """
    ours = next((e for e in entries if e.name.startswith("ours") and e.seconds), None)
    rows = [_row(shape, entry, ours, peak, entropy) for entry in entries if entry.seconds]
    return {
        "shape": shape.__dict__,
        "drafter": drafter,
        "trainable_parameters": parameters(shape),
        "matmul_peak_flops_per_second": peak,
        "target_entropy": entropy,
        "contestants": rows,
        "failed": {entry.name: entry.error for entry in entries if entry.error},
        "goals": _goals(rows),
    }


def _row(shape: Shape, entry: Entry, ours: Entry | None, peak: float, entropy: float) -> dict:
    rows = entry.first["rows"]
    rates = [(rows or shape.tokens_per_step) / s for s in entry.seconds]
    # Of EAGLE-3 the same for all: what a trainer computes twice to save memory does not count.
    flops = step_flops(shape) if rows is None else entry.flops
    work = rows / ours.first["rows"] if rows and ours else 1.0
    losses = entry.first["losses"]
    if entry.name.startswith("specforge"):
        losses = [loss - entropy for loss in losses]
    return {
        "name": entry.name,
        "version": entry.version,
        "rows": rows,
        "flops": flops,
        "per_second": median(rates),
        "per_second_range": [min(rates), max(rates)],
        "seconds": entry.seconds,
        "first_step_seconds": entry.first["seconds"],
        "ours_faster_by": median(t / o / work for t, o in zip(entry.seconds, ours.seconds, strict=False))
        if ours
        else None,
        "memory_bytes": entry.first["memory_bytes"],
        "memory_before_bytes": entry.first["before_bytes"],
        "memory_from": entry.first["memory_from"],
        "ours_memory_share": ours.first["memory_bytes"] / entry.first["memory_bytes"] if ours else None,
        "share_of_peak": flops / median(entry.seconds) / peak,
        "over_products": median(entry.over_products),
        "loss_per_position": losses,
    }


def _goals(rows: list[dict]) -> dict:
    """Ours against the fastest and the leanest way of running any peer."""
    ours = [row for row in rows if row["name"].startswith("ours")]
    peers = [row for row in rows if not row["name"].startswith("ours")]
    if not ours or not peers:
        return {}
    fastest = max(peers, key=lambda row: row["per_second"])
    leanest = min(peers, key=lambda row: row["memory_bytes"])
    return {
        "fastest_peer": fastest["name"],
        "faster_by": fastest["ours_faster_by"],
        "share_of_peak": ours[0]["share_of_peak"],
        "leanest_peer": leanest["name"],
        "memory_share": leanest["ours_memory_share"],
    }


def cells(row: dict) -> list[str]:
    """One line of the table."""
    low, high = row["per_second_range"]
    faster, share = row["ours_faster_by"], row["ours_memory_share"]
    return [
        f"{row['name']} ({row['version']})",
        f"{row['per_second']:.0f}",
        f"{low:.0f} to {high:.0f}",
        "-" if faster is None else f"{faster:.2f}x",
        f"{row['memory_bytes'] / 2**20:.0f}",
        "-" if share is None else f"{share:.0%} of it",
        f"{row['share_of_peak']:.0%}",
        f"{row['over_products']:.2f}x",
        f"{row['loss_per_position'][0]:.4f}" if row["rows"] is None else f"{row['rows']}",
    ]


def columns(summary: dict) -> tuple[str, ...]:
    """The table's header."""
    return COLUMNS if summary["drafter"] == "eagle3" else ROWS_COLUMNS


def rich_table(summary: dict) -> Table:
    """For the terminal."""
    shape = summary["shape"]
    documents = f"{shape['batch']} x {shape['tokens']} tokens"
    title = f"{summary['drafter']} at {shape['name']}: {documents}, K = {shape['ttt_steps']}"
    table = Table(*columns(summary), title=title)
    for row in summary["contestants"]:
        table.add_row(*cells(row))
    return table


def markdown(summary: dict) -> str:
    """For README.md, with machine, date and command beneath."""
    made = summary["made_by"]
    header = columns(summary)
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in summary["contestants"]]
    rates = f"Peak {summary['matmul_peak_flops_per_second'] / 1e9:.0f} GFLOP/s ({summary['shape']['dtype']})"
    work = f"{summary['contestants'][0]['flops'] / 1e9:.0f} GFLOP per step of ours"
    machine = f"{summary['processor']}, {summary['threads']} threads, torch {made['versions']['torch']}"
    command = " ".join(["python", "benchmarks/" + made["command"][0], *made["command"][1:]])
    return "\n".join([*lines, "", f"{rates}, {work}. {machine}, {made['created'][:10]}.", "", f"    {command}"])
