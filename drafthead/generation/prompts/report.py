"""What a person wants to know of prompts before the target answers them: how many, how long, of what, said how.

Tables go to the terminal; report.md and prompts.png lie in results/NAME/prompts. Lengths and vocabulary are those of
at most 5,000 prompts per split, which is a random sample because splits are in the order of a hash.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from drafthead.config import Recipe
from drafthead.data.contamination import Text, find_overlaps
from drafthead.data.prompts import SPLITS, Prompt, read_prompts
from drafthead.data.rendering import UnrenderableError, renderer
from drafthead.generation.prompts.mix import PRESETS, summarise
from drafthead.generation.sources.catalogue import CATALOGUE
from drafthead.provenance import reference
from drafthead.target.tokenizer import load_tokenizer

SAMPLE = 5_000


@dataclass(frozen=True)
class Measured:
    """Prompts of one split as the target reads them.

    Attributes:
        split: of the prompts.
        categories: of each measured prompt.
        lengths: in tokens, in the same order.
        tokens: (V,) how often each token occurs.
        left_out: reason -> prompts that have no token ids for this target.
    """

    split: str
    categories: list[str]
    lengths: list[int]
    tokens: NDArray[np.int64]
    left_out: Counter[str]


def print_prompts(recipe: Recipe, manifest: dict[str, Any]) -> None:
    """A table of counts by category and split, and everything that was left out."""
    counts = {split: Counter(p.category for p in read_prompts(recipe.prompts_dir, split)) for split in SPLITS}
    table = Table("category", *SPLITS, title=f"Prompts in {recipe.prompts_dir}", title_justify="left")
    for category in sorted(set().union(*counts.values())):
        table.add_row(category, *(str(counts[split][category]) for split in SPLITS))
    table.add_section()
    table.add_row("all", *(str(counts[split].total()) for split in SPLITS))
    Console().print(table)
    for line in describe(recipe, manifest["counts"]):
        print(line)


def describe(recipe: Recipe, counts: Mapping[str, Any]) -> list[str]:
    """What was dropped and why, what a source could not give, and what a head of these prompts may not be used for."""
    lines = []
    if dropped := counts["duplicates_dropped"]:
        lines.append(f"{dropped} duplicate {'prompts' if 'sources' in counts else 'lines'} were dropped")
    for name, source in counts.get("sources", {}).items():
        for reason, number in source["refused"].items():
            where = source["refused_examples"][reason]
            lines.append(f"{name}: {number} of {source['rows']} rows left out: {reason} (such as {where})")
    for pair in counts.get("overlaps", []):
        lines.append(f"{_overlap(pair)}; dropped from training")
    if counts.get("template_runs"):
        lines.append(f"{counts['template_runs']} word runs are templates of many documents and were not compared")
    lines += counts.get("notes", [])
    configs = PRESETS[recipe.prompts.preset] if recipe.prompts.preset else recipe.prompts.sources or ()
    for config in configs:
        entry = CATALOGUE.get(config.name)
        if entry and entry.reminder and counts["sources"][config.name]["train"]:
            lines.append(f"REMINDER: {entry.reminder}")
    return lines


def report_prompts(recipe: Recipe, manifest: dict[str, Any]) -> None:
    """Write results/NAME/prompts/report.md and prompts.png, unless they are of these prompts already."""
    directory = recipe.results_dir / "prompts"
    mark = f"<!-- prompts {reference(manifest)} -->"
    path = directory / "report.md"
    if path.exists() and path.read_text(encoding="utf-8").startswith(mark):
        return
    from drafthead.generation.prompts.figures import write_figure  # matplotlib takes a second to import

    splits = {split: read_prompts(recipe.prompts_dir, split) for split in SPLITS}
    lines = [mark, f"# Prompts of {recipe.name}", "", *_counts_table(splits), "", *describe(recipe, manifest["counts"])]
    if recipe.prompts.path:
        lines += ["", *_shared_words(splits)]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        measured = measure(recipe, splits)
    except OSError as error:
        lines += ["", f"No lengths and no vocabulary: the target's tokenizer is not on this machine ({error})"]
    else:
        lines += ["", *_length_table(measured), "", *_vocabulary_lines(recipe, measured), "", "![](prompts.png)"]
        write_figure(directory / "prompts.png", measured, recipe.head.draft_vocab_size)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"report: {path}")


def measure(recipe: Recipe, splits: Mapping[str, Sequence[Prompt]]) -> list[Measured]:
    """Render a sample of every split.

    Raises:
        OSError: the target's tokenizer is not on this machine.
    """
    tokenizer = load_tokenizer(recipe)
    render, measured = renderer(recipe, tokenizer), []
    for split, prompts in splits.items():
        result = Measured(split, [], [], np.zeros(len(tokenizer), dtype=np.int64), Counter())
        for prompt in prompts[:SAMPLE]:
            try:
                ids = render(prompt, recipe.eval.reasoning_effort)
            except UnrenderableError as error:
                result.left_out[error.reason] += 1
                continue
            result.categories.append(prompt.category)
            result.lengths.append(len(ids))
            np.add.at(result.tokens, ids, 1)
        measured.append(result)
    return measured


def _counts_table(splits: Mapping[str, Sequence[Prompt]]) -> list[str]:
    keys = sorted({(p.source, p.category) for prompts in splits.values() for p in prompts})
    counts = {split: Counter((p.source, p.category) for p in prompts) for split, prompts in splits.items()}
    rows = [
        [source, category, *(str(counts[split][source, category]) for split in splits)] for source, category in keys
    ]
    return _markdown(["source", "category", *splits], rows)


def _length_table(measured: Sequence[Measured]) -> list[str]:
    rows = []
    for m in measured:
        for category in [*sorted(set(m.categories)), "all"]:
            lengths = [n for n, c in zip(m.lengths, m.categories, strict=True) if category in (c, "all")]
            if lengths:
                quantiles = np.quantile(lengths, [0.5, 0.95, 1.0])
                rows.append([m.split, category, str(len(lengths)), *(f"{q:.0f}" for q in quantiles)])
    return _markdown(["split", "category", "measured", "median tokens", "95th percentile", "longest"], rows)


def _vocabulary_lines(recipe: Recipe, measured: Sequence[Measured]) -> list[str]:
    train = next(m for m in measured if m.split == "train")
    size = recipe.head.draft_vocab_size or int(np.count_nonzero(train.tokens))  # by coverage: known after the answers
    frequent = np.argsort(-train.tokens, kind="stable")[:size]
    lines = [
        f"{np.count_nonzero(m.tokens):,} of {len(m.tokens):,} tokens of the vocabulary occur in {m.split}; the "
        f"{size:,} most frequent of train are {m.tokens[frequent].sum() / max(m.tokens.sum(), 1):.1%} of its text"
        for m in measured
    ]
    left_out = [f"{m.split}: {n} left out, {reason}" for m in measured for reason, n in m.left_out.items()]
    return [*lines, "(of prompts; the draft vocabulary itself is chosen from what the target answers)", *left_out]


def _shared_words(splits: Mapping[str, Sequence[Prompt]]) -> list[str]:
    """Overlaps within a file that declares its own splits: reported, because its author decides."""
    texts = {
        split: [Text(p.id, p.source, p.id, " ".join(m["content"] for m in p.messages)) for p in prompts]
        for split, prompts in splits.items()
    }
    pairs = summarise(find_overlaps([*texts["train"], *texts["validation"]], texts["heldout"]).found)
    return [f"{_overlap(pair)}; kept, as the file declares its own splits" for pair in pairs] or ["No overlaps."]


def _overlap(pair: Mapping[str, Any]) -> str:
    example = pair["example"]
    return (
        f"{pair['prompts']} training prompts of {pair['train']} share 13 words with held-out {pair['heldout']}, such "
        f'as {example["train"]} with {example["heldout"]}: "{example["words"]}"'
    )


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *rows]]
