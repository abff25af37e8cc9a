"""From a JSONL of conversations to the three splits of the prompts artefact.

Each line carries its own `split` (train or heldout), because only the author of a data set knows which lines are
related; validation prompts are carved out of train. Draws are ordered by a hash of seed and content, so adding
lines to a source disturbs as little as possible. Given up: fuzzy near-duplicates. Lines that differ only in case
or white space count as the same.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from drafthead.config import REPO_ROOT, Recipe
from drafthead.data.prompts import KIND, SPLITS, Prompt, parse_prompt, read_prompts, write_prompts
from drafthead.provenance import begin, digest, finish, read_json, sha256_file

_SOURCE_SPLITS = ("train", "heldout")


@dataclass(frozen=True)
class Source:
    """A parsed JSONL source.

    Attributes:
        splits: "train" and "heldout" -> prompts in file order, without duplicates.
        duplicates: how many lines repeated an earlier one.
    """

    splits: dict[str, list[Prompt]]
    duplicates: int


def make_prompts(recipe: Recipe) -> dict[str, Any]:
    """Write the prompts artefact of a recipe, or find it complete; returns its manifest.

    Raises:
        FileNotFoundError: prompts.path does not exist.
        ValueError: a line is not a prompt, the splits overlap, or a split would be empty.
        ArtefactError: the directory holds prompts made from something else.
    """
    path = REPO_ROOT / recipe.prompts.path
    if not path.is_file():
        raise FileNotFoundError(
            f"prompts.path {recipe.prompts.path} does not exist (looked at {path}): give a JSONL file whose lines have "
            '"messages" and "split"'
        )
    settings = recipe.prompts.model_dump(exclude={"path"})
    source_sha256 = sha256_file(path)
    directory = recipe.prompts_dir
    identity = {"source": path.name, "source_sha256": source_sha256, "settings": settings}
    if begin(directory, KIND, identity):
        return read_json(directory / "manifest.json")
    source = read_source(path)
    splits = split_prompts(recipe, source)
    for split, prompts in splits.items():
        write_prompts(directory / f"{split}.parquet", prompts)
    counts = {split: len(prompts) for split, prompts in splits.items()}
    return finish(directory, {**counts, "duplicates_dropped": source.duplicates})


def read_source(path: Path) -> Source:
    """Parse a JSONL file.

    Raises:
        ValueError: a line is not a prompt (named as file:line), there is none, or a text is in both splits.
    """
    splits: dict[str, list[Prompt]] = {split: [] for split in _SOURCE_SPLITS}
    seen: dict[str, tuple[str, int]] = {}  # normalised content -> split and line it was first seen in
    duplicates = 0
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        row = _parse_line(line, where)
        split = row.get("split")
        if split not in _SOURCE_SPLITS:
            raise ValueError(f'{where}: split is {split!r}; write "split": "train" or "split": "heldout"')
        prompt = parse_prompt(row, where)
        first_split, first_line = seen.setdefault(_normalised(prompt), (split, number))
        if first_split != split:
            raise ValueError(
                f"{where}: this {split} prompt is also in split {first_split} (line {first_line}), so results on "
                "held-out prompts would be flattered; remove one of the two"
            )
        if first_line == number:
            splits[split].append(prompt)
        else:
            duplicates += 1
    for split, prompts in splits.items():
        if not prompts:
            raise ValueError(f'{path} has no line with "split": "{split}"; the pipeline needs both train and heldout')
    return Source(splits, duplicates)


def split_prompts(recipe: Recipe, source: Source) -> dict[str, list[Prompt]]:
    """Train, validation and held-out prompts, each in an order fixed by seed and content.

    Validation is drawn first, so that another max_train keeps the prompts that checkpoints are compared on.

    Raises:
        ValueError: no training prompt would be left.
    """
    settings = recipe.prompts
    pool = source.splits["train"]
    if settings.validation >= len(pool):
        raise ValueError(
            f"prompts.validation {settings.validation} leaves nothing to train on: {settings.path} has {len(pool)} "
            "training prompts; lower prompts.validation or add lines"
        )
    validation = draw_evenly(pool, settings.validation, settings.seed)
    taken = {prompt.id for prompt in validation}
    rest = [prompt for prompt in pool if prompt.id not in taken]
    return {
        "train": draw_evenly(rest, settings.max_train, settings.seed),
        "validation": validation,
        "heldout": draw_evenly(source.splits["heldout"], settings.max_heldout, settings.seed),
    }


def draw_evenly(prompts: Sequence[Prompt], limit: int | None, seed: int) -> list[Prompt]:
    """At most `limit` prompts, categories as even as their sizes allow; deterministic in seed and content."""
    order = {prompt.id: digest([seed, prompt.id]) for prompt in prompts}
    by_category: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in sorted(prompts, key=lambda p: order[p.id]):
        by_category[prompt.category].append(prompt)
    # Rank within the category first: the first n of this order hold every category's first n / categories.
    ranked = [(rank, order[p.id], p) for group in by_category.values() for rank, p in enumerate(group)]
    drawn = sorted(ranked, key=lambda entry: entry[:2])[:limit]
    return sorted((prompt for _, _, prompt in drawn), key=lambda p: order[p.id])


def print_prompts(recipe: Recipe, manifest: dict[str, Any]) -> None:
    """A table of counts, split by category."""
    splits = {split: read_prompts(recipe.prompts_dir, split) for split in SPLITS}
    categories = sorted({prompt.category for prompts in splits.values() for prompt in prompts})
    table = Table("split", *categories, "all", title=f"Prompts in {recipe.prompts_dir}", title_justify="left")
    for split, prompts in splits.items():
        counts = [sum(p.category == category for p in prompts) for category in categories]
        table.add_row(split, *map(str, counts), str(len(prompts)))
    Console().print(table)
    if dropped := manifest["counts"]["duplicates_dropped"]:
        print(f"{dropped} duplicate lines were dropped")


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{where}: not a JSON object in UTF-8 ({error}): {line[:60]!r}; correct or remove the line"
        ) from error
    if not isinstance(row, dict):
        raise ValueError(f'{where}: found {row!r}, wanted an object with "messages" and "split"')
    messages = row.get("messages")
    if isinstance(messages, list):
        for message in messages:
            if not isinstance(message, dict):
                raise ValueError(f'{where}: message {message!r} is not an object with "role" and "content"')
    return row


def _normalised(prompt: Prompt) -> str:
    return digest([[m["role"], " ".join(m["content"].casefold().split())] for m in prompt.messages])
