"""The files of a source, and their rows: the recipe's path, data/sources/NAME of the checkout, or the hub's cache.

Parquet and CSV are read by `datasets`, as streams, which writes no cache. Two things it does not do are done here.
Offline it looks only for what it prepared itself, so files of the hub are located by `snapshot_download`. And it gives
all rows of a JSON file one Arrow schema, which turns prompts that are dates into time stamps, adds keys of other rows
to tools, and refuses the file for one invalid character; rows of JSON are parsed one by one instead.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafthead.config.recipe import REPO_ROOT, PromptSource
from drafthead.files import foreign, sha256_file
from drafthead.generation.sources import CATALOGUE, LOCAL, Entry

_MEND = "Mend it, fetch it again, or give another file"
_EXTENSION = re.compile(r"\.(jsonl|json|parquet|csv)(\.gz)?$")


@dataclass(frozen=True)
class Located:
    """A source with its files.

    Attributes:
        config: the recipe's lines.
        entry: of the catalogue.
        files: split by hash of the document, or all for training when there are `heldout_files`.
        heldout_files: the published test split.
        identity: changes with any byte of any file.
    """

    config: PromptSource
    entry: Entry
    files: list[Path]
    heldout_files: list[Path]
    identity: dict[str, Any]

    @property
    def heldout_share(self) -> float:
        """Share of the documents of `files` that no stage may train on."""
        return self.config.heldout_share or (0.0 if self.heldout_files else self.entry.heldout_share)


def locate(config: PromptSource) -> Located:
    """Find the files of a source.

    Raises:
        FileNotFoundError: they are not on this machine; the message is the command that downloads them.
        ValueError: the name is unknown, or files are missing from a set.
    """
    if config.name not in CATALOGUE and config.path is None:
        raise ValueError(
            f"prompts.sources: {config.name} is not a known source ({', '.join(CATALOGUE)}); "
            "give it a path to read a file of your own"
        )
    entry = CATALOGUE.get(config.name, LOCAL)
    place = REPO_ROOT / (config.path or f"data/sources/{config.name}")
    if config.path or place.is_dir():
        files, heldout = find(place, entry.files or ("*",)), find(place, entry.heldout_files)
        if place.is_file():
            files = [place]
        if not files and not heldout:
            wanted = ", ".join(entry.files) or "*.jsonl, *.json, *.parquet, *.csv"
            raise FileNotFoundError(f"prompts: {place} of {config.name} does not exist or has no file like {wanted}")
        return Located(config, entry, files, heldout, {"files": {f.name: sha256_file(f) for f in [*files, *heldout]}})
    reason = "it is not on the hub"
    for local_only in (True, False) if entry.hub else ():
        try:
            return _snapshot(config, entry, local_only)
        except OSError as error:  # of the hub, too
            reason = str(error).strip().splitlines()[0]
    raise FileNotFoundError(
        f"prompts.sources: {config.name} is not on this machine ({reason}). On one with a network run\n"
        f"  {download_command(config.name, entry)}\n"
        "or give the source a path to its file or folder"
    )


def download_command(name: str, entry: Entry) -> str:
    """The command that brings a source to this machine."""
    if not entry.hub:
        return entry.fetch.format(folder=REPO_ROOT / "data" / "sources" / name)
    patterns = " ".join(f'--include "{pattern}"' for pattern in (*entry.files, *entry.heldout_files))
    return f"hf download {entry.hub} --repo-type dataset {patterns}"


def _snapshot(config: PromptSource, entry: Entry, local_only: bool) -> Located:
    from huggingface_hub import snapshot_download

    patterns = [*entry.files, *entry.heldout_files]
    found = snapshot_download(entry.hub, repo_type="dataset", allow_patterns=patterns, local_files_only=local_only)
    folder = Path(found)
    files, heldout = find(folder, entry.files), find(folder, entry.heldout_files)
    if not files or (entry.heldout_files and not heldout):
        raise FileNotFoundError(f"{folder} has no {' and '.join(patterns)}")
    # A snapshot's folder is named by its commit, which fixes every byte in it.
    names = sorted(str(file.relative_to(folder)) for file in [*files, *heldout])
    return Located(config, entry, files, heldout, {"hub": entry.hub, "commit": folder.name, "files": names})


def find(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """Files below `folder` whose path, or name, fits one of the patterns; in order of their path.

    Raises:
        ValueError: a numbered shard (x-00000-of-00002) has not all its siblings.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file() and _EXTENSION.search(path.name))
    names = [Path(pattern).name for pattern in patterns]
    fitting = [path for path in files if any(map(path.match, patterns))]
    fitting = fitting or [path for path in files if any(map(path.match, names))]
    for path in fitting:
        if shard := re.search(r"-\d+-of-(\d+)", path.name):
            siblings = [p for p in fitting if p.name.startswith(path.name[: shard.start()] + "-")]
            if len(siblings) < int(shard[1]):
                raise ValueError(f"{folder} has {len(siblings)} of the {int(shard[1])} files of {path}; get the others")
    return fitting


def read(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row of a file, as (file and line or row, row); empty lines are passed over.

    A .json file holds one object per line, as .jsonl does, or a list of objects.

    Raises:
        ValueError: the extension is unknown, or a row is not a JSON object in UTF-8.
    """
    extension = _EXTENSION.search(path.name)
    if extension is None:
        raise ValueError(f"{path}: the extension must be .jsonl, .json, .parquet or .csv, or one of these with .gz")
    if extension[1] in ("parquet", "csv"):
        from datasets import load_dataset  # takes a second to import

        with foreign(path, _MEND):
            rows = load_dataset(extension[1], data_files=str(path), split="train", streaming=True)
            yield from ((f"{path}:row {number}", row) for number, row in enumerate(rows, start=1))
        return
    for line, data in _lines(path, may_be_list=extension[1] == "json"):
        try:
            value = json.loads(data.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            start = f"{path}:{line}: not JSON in UTF-8 ({error})"
            raise ValueError(f"{start}: {data[:60]!r}; correct or remove it") from error
        is_list = line == 0
        for number, row in enumerate(value if is_list else [value], start=1):
            where = f"{path}:row {number}" if is_list else f"{path}:{line}"
            if not isinstance(row, dict):
                raise ValueError(f"{where}: found {row!r:.60}, wanted an object")
            yield where, row


def _lines(path: Path, may_be_list: bool) -> Iterator[tuple[int, bytes]]:
    """Lines of a file that are not empty, with their numbers from 1; as line 0 a whole file that holds a list."""
    import fsspec  # comes with datasets

    with foreign(path, _MEND), fsspec.open(str(path), "rb", compression="infer") as file:
        if may_be_list:
            is_list = file.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"[")
            file.seek(0)
            if is_list:
                yield 0, file.read()
                return
        yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())
