"""Tables and a picture of the prompts before the target responds: how many, how long, and of what.

Tables go to the terminal; report.md and prompts.png lie in results/NAME/prompts. Lengths and vocabulary are those of
at most 5,000 prompts per split, which is a random sample because splits are in the order of a hash.
"""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from drafthead.artifacts import reference
from drafthead.config import Recipe
from drafthead.data.contamination import Text, find_overlaps
from drafthead.data.prompts import SPLITS, Prompt, read_prompts
from drafthead.data.rendering import UnrenderableError, renderer
from drafthead.files import atomic_path, in_markdown
from drafthead.generation.prompt_mix import sources_of, summarise
from drafthead.generation.sources import CATALOGUE
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
    """Print counts by category and split, and everything that was left out."""
    counts = {split: Counter(p.category for p in read_prompts(recipe.prompts_dir, split)) for split in SPLITS}
    table = Table("category", *SPLITS, title=escape(f"Prompts in {recipe.prompts_dir}"), title_justify="left")
    for category in sorted(set().union(*counts.values())):
        table.add_row(escape(category), *(str(counts[split][category]) for split in SPLITS))
    table.add_section()
    table.add_row("all", *(str(counts[split].total()) for split in SPLITS))
    Console().print(table)
    for line in describe(recipe, manifest["counts"]):
        print(line)


def describe(recipe: Recipe, counts: Mapping[str, Any]) -> list[str]:
    """What was dropped and why, what a source could not give, and what a head of these prompts may not be used for."""
    lines = []
    if dropped := counts["duplicates_dropped"]:
        lines.append(f"{dropped} duplicate prompts were dropped")
    for name, source in counts.get("sources", {}).items():
        for reason, number in source["refused"].items():
            where = source["refused_examples"][reason]
            lines.append(f"{name}: {number} of {source['rows']} rows left out: {reason} (such as {where})")
    for pair in counts.get("overlaps", []):
        lines.append(f"{_overlap(pair)}; dropped from training")
    if counts.get("template_runs"):
        lines.append(f"{counts['template_runs']} word runs are templates of many documents and were not compared")
    lines += counts.get("notes", [])
    for config in sources_of(recipe.prompts):
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
    splits = {split: read_prompts(recipe.prompts_dir, split) for split in SPLITS}
    lines = [mark, f"# Prompts of {recipe.name}", "", *_counts_table(splits), "", *describe(recipe, manifest["counts"])]
    if recipe.prompts.path:
        lines += ["", *_overlaps_of_file(splits)]
    directory.mkdir(parents=True, exist_ok=True)
    try:
        measured = measure(recipe, splits)
    except OSError as error:
        lines += ["", f"No lengths and no vocabulary: the target's tokenizer is not on this machine ({error})"]
    else:
        lines += ["", *_length_table(measured), "", *_vocabulary_lines(recipe, measured), "", "![](prompts.png)"]
        write_figure(directory / "prompts.png", measured, recipe.head.draft_vocab_size)
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    logging.getLogger(__name__).info("report: %s", path)


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
    counts = {split: Counter((p.source, p.category) for p in prompts) for split, prompts in splits.items()}
    keys = sorted(set().union(*counts.values()))
    return _markdown(["source", "category", *splits], [[*key, *(c[key] for c in counts.values())] for key in keys])


def _length_table(measured: Sequence[Measured]) -> list[str]:
    rows = []
    for m in measured:
        for category in [*sorted(set(m.categories)), "all"]:
            lengths = [n for n, c in zip(m.lengths, m.categories, strict=True) if category in (c, "all")]
            if lengths:
                quantiles = np.quantile(lengths, [0.5, 0.95, 1.0])
                rows.append([m.split, category, len(lengths), *(f"{q:.0f}" for q in quantiles)])
    return _markdown(["split", "category", "measured", "median tokens", "95th percentile", "longest"], rows)


def _vocabulary_lines(recipe: Recipe, measured: Sequence[Measured]) -> list[str]:
    train = next(m for m in measured if m.split == "train")
    size = recipe.head.draft_vocab_size or int(np.count_nonzero(train.tokens))  # by coverage: known with the responses
    frequent = np.argsort(-train.tokens, kind="stable")[:size]
    lines = [
        f"{np.count_nonzero(m.tokens):,} of {len(m.tokens):,} tokens of the vocabulary occur in {m.split}; the "
        f"{size:,} most frequent of train are {m.tokens[frequent].sum() / max(m.tokens.sum(), 1):.1%} of its text"
        for m in measured
    ]
    left_out = [f"{m.split}: {n} left out, {reason}" for m in measured for reason, n in m.left_out.items()]
    return [*lines, "(of prompts; the draft vocabulary itself is chosen from the responses)", *left_out]


def _overlaps_of_file(splits: Mapping[str, Sequence[Prompt]]) -> list[str]:
    """Overlaps within a file that declares its own splits: reported, because its author decides."""
    texts = {
        split: [Text(p.id, p.source, p.id, " ".join(m["content"] for m in p.messages)) for p in prompts]
        for split, prompts in splits.items()
    }
    pairs = summarise(find_overlaps([*texts["train"], *texts["validation"]], texts["heldout"]).found)
    return [f"{_overlap(pair)}; kept, as prompts.path decides its splits" for pair in pairs] or ["No overlaps."]


def _overlap(pair: Mapping[str, Any]) -> str:
    example = pair["example"]
    return (
        f"{pair['prompts']} training prompts of {pair['train']} share 13 words with held-out {pair['heldout']}, such "
        f'as {example["train"]} with {example["heldout"]}: "{example["words"]}"'
    )


def _markdown(header: Sequence[str], rows: Sequence[Sequence[object]]) -> list[str]:
    cells = [header, ["---"] * len(header), *(map(in_markdown, row) for row in rows)]
    return ["| " + " | ".join(row) + " |" for row in cells]


def write_figure(path: Path, measured: Sequence[Measured], draft_vocab_size: int) -> None:
    """Draw lengths, categories and the coverage of the vocabulary as a PNG."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(13, 4), layout="constrained")
    lengths, categories, vocabulary = figure.subplots(1, 3)
    bins = np.geomspace(1, max(max(m.lengths, default=1) for m in measured) + 1, 40).tolist()
    names = [name for name, _ in Counter(c for m in measured for c in m.categories).most_common(15)][::-1]
    by_frequency = np.argsort(-measured[0].tokens, kind="stable")
    for i, m in enumerate(measured):
        lengths.hist(m.lengths, bins=bins, density=True, histtype="step", label=m.split)
        shares = [m.categories.count(name) / max(len(m.categories), 1) for name in names]
        categories.barh(np.arange(len(names)) - 0.27 * (i - 1), shares, height=0.25, label=m.split)
        covered = np.cumsum(m.tokens[by_frequency]) / max(m.tokens.sum(), 1)
        vocabulary.plot(np.arange(1, len(covered) + 1), covered, label=m.split)
    vocabulary.axvline(draft_vocab_size, color="grey", linestyle=":", label="draft_vocab_size")
    lengths.set(title="length of the prompts", xlabel="tokens, template included", ylabel="density", xscale="log")
    categories.set(title="share of each category (the 15 largest)", yticks=range(len(names)))
    categories.set_yticklabels([name.replace("$", r"\$") for name in names])
    most_frequent = f"most frequent tokens of {measured[0].split}"
    vocabulary.set(title="share of the text", xlabel=most_frequent, xscale="log", ylim=(0, 1))
    lengths.legend()
    vocabulary.legend()
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=100)
