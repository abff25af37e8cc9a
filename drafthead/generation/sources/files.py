"""Rows of local files, each with where it stands: JSONL, JSON, Parquet, CSV.

Parquet and CSV stream through `datasets`. JSON goes through the standard library instead, row by row: Arrow would
give all rows one schema, so that one message with a list for its text, or tools with other arguments, spoils a file.
"""

import json
import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

EXTENSIONS = (".jsonl", ".json", ".parquet", ".csv")


def find(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Files below `folder` whose path, or name, fits one of the patterns; in order of their path.

    Raises:
        ValueError: a numbered shard (x-00000-of-00002) has not all its siblings.
    """
    relative = sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file() and p.suffix in EXTENSIONS)
    names = [pattern.rsplit("/", 1)[-1] for pattern in patterns]
    fitting = [p for p in relative if any(fnmatch(str(p), pattern) for pattern in patterns)]
    fitting = fitting or [p for p in relative if any(fnmatch(p.name, name) for name in names)]
    for path in fitting:
        if shard := re.search(r"-(\d+)-of-(\d+)", path.name):
            siblings = [p for p in fitting if p.name.startswith(path.name[: shard.start()] + "-")]
            if len(siblings) < int(shard[2]):
                raise ValueError(f"{folder} has {len(siblings)} of the {int(shard[2])} files of {path}; get the others")
    return [folder / path for path in fitting]


def read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row of a file, as (where, row); empty lines are passed over.

    Raises:
        ValueError: the extension is unknown, or a row is not a JSON object in UTF-8.
    """
    if path.suffix == ".jsonl":
        yield from _lines(path)
    elif path.suffix == ".json":
        yield from _json(path)
    elif path.suffix in (".parquet", ".csv"):
        from datasets import load_dataset  # takes a second to import

        rows = load_dataset(path.suffix[1:], data_files=str(path), split="train", streaming=True)
        for number, row in enumerate(rows, start=1):
            yield f"{path}:row {number}", row
    else:
        raise ValueError(f"{path}: the extension must be one of {', '.join(EXTENSIONS)}")


def _lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                yield f"{path}:{number}", parse_object(line, f"{path}:{number}")


def _json(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """A list of objects, or one object per line, which some data sets publish under this name."""
    with path.open("rb") as file:
        if not file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"["):
            yield from _lines(path)
            return
    rows = _parsed(path.read_bytes(), str(path))
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}:row {number}: found {row!r:.60}, wanted an object")
        yield f"{path}:row {number}", row


def parse_object(line: bytes, where: str) -> dict[str, Any]:
    """A line of JSON.

    Args:
        line: its bytes.
        where: file and line, for the error message.

    Raises:
        ValueError: it is not a JSON object in UTF-8.
    """
    row = _parsed(line, where)
    if not isinstance(row, dict):
        raise ValueError(f"{where}: found {row!r:.60}, wanted an object")
    return row


def _parsed(data: bytes, where: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where}: not JSON in UTF-8 ({error}): {data[:60]!r}; correct or remove it") from error
