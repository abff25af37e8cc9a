"""From what the contestants answered to numbers, a table and Markdown.

Speed is the median over rounds with its range. "ours / it" compares within rounds: the median over rounds
of the other's seconds divided by ours. Losses are compared at the first step, where all weights are equal.
"""

from statistics import median

from rich.table import Table

from stepbench.referee import Entry
from stepbench.shapes import Shape, parameters, step_flops

COLUMNS = (
    "contestant", "tokens/s", "range", "ours is faster by", "memory MiB", "ours needs", "share of peak", "first loss"
)  # fmt: skip


def summarise(shape: Shape, entries: list[Entry], peak: float, entropy: float) -> dict:
    """Everything measured, as JSON.

    Args:
        shape: that was run.
        entries: of all contestants, ours among them or not.
        peak: measured FLOP/s of matrix products.
        entropy: mean entropy of the target over the draft vocabulary, which SpecForge's loss includes.
    """
    flops = step_flops(shape)
    ours = next((e for e in entries if e.name.startswith("ours") and e.seconds), None)
    rows = [_row(shape, entry, ours, flops, peak, entropy) for entry in entries if entry.seconds]
    return {
        "shape": shape.__dict__,
        "trainable_parameters": parameters(shape),
        "flops_per_step": flops,
        "matmul_peak_flops_per_second": peak,
        "target_entropy": entropy,
        "contestants": rows,
        "failed": {entry.name: entry.error for entry in entries if entry.error},
        "goals": _goals(rows),
    }


def _row(shape: Shape, entry: Entry, ours: Entry | None, flops: float, peak: float, entropy: float) -> dict:
    rates = [shape.tokens_per_step / s for s in entry.seconds]
    losses = entry.first["losses"]
    if entry.name.startswith("specforge"):
        losses = [loss - entropy for loss in losses]
    return {
        "name": entry.name,
        "version": entry.version,
        "tokens_per_second": median(rates),
        "tokens_per_second_range": [min(rates), max(rates)],
        "seconds": entry.seconds,
        "first_step_seconds": entry.first["seconds"],
        "ours_faster_by": median(t / o for t, o in zip(entry.seconds, ours.seconds, strict=False)) if ours else None,
        "memory_bytes": entry.first["memory_bytes"],
        "memory_before_bytes": entry.first["before_bytes"],
        "memory_from": entry.first["memory_from"],
        "ours_memory_share": ours.first["memory_bytes"] / entry.first["memory_bytes"] if ours else None,
        "share_of_peak": flops / median(entry.seconds) / peak,
        "loss_per_ttt_step": losses,
    }


def _goals(rows: list[dict]) -> dict:
    """Ours against the fastest and the leanest way of running any peer."""
    ours = [row for row in rows if row["name"].startswith("ours")]
    peers = [row for row in rows if not row["name"].startswith("ours")]
    if not ours or not peers:
        return {}
    fastest = max(peers, key=lambda row: row["tokens_per_second"])
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
    low, high = row["tokens_per_second_range"]
    faster, share = row["ours_faster_by"], row["ours_memory_share"]
    return [
        f"{row['name']} ({row['version']})",
        f"{row['tokens_per_second']:.0f}",
        f"{low:.0f} to {high:.0f}",
        "-" if faster is None else f"{faster:.2f}x",
        f"{row['memory_bytes'] / 2**20:.0f}",
        "-" if share is None else f"{share:.0%} of it",
        f"{row['share_of_peak']:.0%}",
        f"{row['loss_per_ttt_step'][0]:.4f}",
    ]


def rich_table(summary: dict) -> Table:
    """For the terminal."""
    shape = summary["shape"]
    title = f"{shape['name']}: {shape['batch']} x {shape['tokens']} tokens, {shape['ttt_steps']} TTT steps"
    table = Table(*COLUMNS, title=title)
    for row in summary["contestants"]:
        table.add_row(*cells(row))
    return table


def markdown(summary: dict) -> str:
    """For README.md, with machine, date and command beneath."""
    made = summary["made_by"]
    lines = ["| " + " | ".join(COLUMNS) + " |", "|" + "---|" * len(COLUMNS)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in summary["contestants"]]
    rates = f"Peak {summary['matmul_peak_flops_per_second'] / 1e9:.0f} GFLOP/s ({summary['shape']['dtype']})"
    work = f"{summary['flops_per_step'] / 1e9:.0f} GFLOP per step"
    machine = f"{summary['processor']}, {summary['threads']} threads, torch {made['versions']['torch']}"
    command = " ".join(["python", "benchmarks/" + made["command"][0], *made["command"][1:]])
    return "\n".join([*lines, "", f"{rates}, {work}. {machine}, {made['created'][:10]}.", "", f"    {command}"])
