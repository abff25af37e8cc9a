"""A JSONL of conversations that declares its own splits.

Each line carries its own `split` (train or heldout), because only the author of a data set knows which lines are
related. Given up: fuzzy near-duplicates. Lines that differ only in case or white space count as the same.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafthead.data.prompts import Prompt, parse_prompt
from drafthead.generation.draw import normalised
from drafthead.generation.sources.files import parse_object

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
        first_split, first_line = seen.setdefault(normalised(prompt), (split, number))
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


def _parse_line(line: bytes, where: str) -> dict[str, Any]:
    row = parse_object(line, where)
    if b"\\u" in line:  # the only way to half of a surrogate pair
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"{where}: text that is not valid Unicode (a lone surrogate: {error.object[error.start]!a}); "
                "correct or remove the line"
            ) from error
    messages = row.get("messages")
    if isinstance(messages, list):
        for message in messages:
            if not isinstance(message, dict):
                raise ValueError(f'{where}: message {message!r} is not an object with "role" and "content"')
    return row
