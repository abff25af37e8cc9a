"""What a person wants to know of regenerated text before spending hours on it: lengths, truncation, repetition."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from drafthead.config import Recipe
from drafthead.data.responses import KIND, read_responses
from drafthead.provenance import require

_N = 8  # a repeated run of eight tokens is rarely honest text


def print_responses(recipe: Recipe, splits: Sequence[str]) -> None:
    """A table per split and category: count, mean tokens, share truncated, share that repeats itself."""
    table = Table(
        "split", "category", "responses", "mean tokens", "truncated", f"> 10 % repeated {_N}-grams",
        title="Responses", title_justify="left",
    )  # fmt: skip
    notes = []
    for split in splits:
        manifest = require(recipe.responses_dir(split), KIND, "python data_gen/regenerate.py RECIPE")
        responses = read_responses(recipe.responses_dir(split))
        for category in [*sorted({r.category for r in responses}), "all"]:
            group = [r for r in responses if category in (r.category, "all")]
            table.add_row(
                split,
                category,
                str(len(group)),
                f"{sum(len(r.response_ids) for r in group) / len(group):.0f}",
                f"{sum(r.finish_reason == 'length' for r in group) / len(group):.0%}",
                f"{sum(repeats_itself(r.response_ids) for r in group) / len(group):.0%}",
            )
        table.add_section()
        notes += [f"{split}: {n} prompts left out, {why}" for why, n in manifest["counts"]["skipped"].items()]
    Console().print(table)
    for note in notes:
        print(note)


def repeats_itself(token_ids: Sequence[int], n: int = _N, limit: float = 0.1) -> bool:
    """Whether more than `limit` of the text's n-grams occurred before in it."""
    grams = [tuple(token_ids[i : i + n]) for i in range(len(token_ids) - n + 1)]
    return bool(grams) and 1 - len(set(grams)) / len(grams) > limit
