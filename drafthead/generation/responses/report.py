"""What a person wants to know of answers before spending hours on them: lengths, what is wrong, what is missing."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from drafthead.config import Recipe
from drafthead.data.responses import KIND, LeftOut, Response, read_left_out, read_parts
from drafthead.generation.responses.judging import FLAGS
from drafthead.provenance import require


def print_responses(recipe: Recipe, splits: Sequence[str]) -> None:
    """A table per split and category, and a line per reason why answers are missing.

    Shares are of all answers given, those that the recipe drops included.
    """
    table = Table(
        "split", "category", "kept", "dropped", "mean tokens", *FLAGS, title="Responses", title_justify="left"
    )
    notes = []
    for split in splits:
        directory = recipe.responses_dir(split)
        counts = require(directory, KIND, "python data_gen/regenerate.py RECIPE")["counts"]
        responses = [response for part in read_parts(directory).values() for response in part]
        drops = [entry for entry in read_left_out(directory) if entry.flags]
        categories = {r.category for r in responses} | {entry.category for entry in drops}
        for category in [*sorted(categories), "all"]:
            kept = [r for r in responses if category in (r.category, "all")]
            dropped = [entry for entry in drops if category in (entry.category, "all")]
            table.add_row(split, category, *_cells(kept, dropped))
        table.add_section()
        notes += [f"{split}: without an answer: {n}, {why}" for why, n in counts["skipped"].items()]
        notes += [
            f"{split}: dropped as {flag}: {n['dropped']}" for flag, n in counts["flagged"].items() if n["dropped"]
        ]
    Console().print(table)
    for note in notes:
        print(note)


def _cells(kept: Sequence[Response], dropped: Sequence[LeftOut]) -> list[str]:
    mean = sum(len(r.response_ids) for r in kept) / len(kept) if kept else 0
    flags = [r.flags for r in kept] + [entry.flags for entry in dropped]
    shares = [f"{sum(flag in earned for earned in flags) / len(flags):.0%}" for flag in FLAGS]
    return [str(len(kept)), str(len(dropped)), f"{mean:.0f}", *shares]
