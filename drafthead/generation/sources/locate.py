"""Where the files of a source are: the recipe's path, data/sources/NAME of the checkout, or the hub's cache.

`datasets.load_dataset` with a hub id does not read the hub's cache when offline (it looks only for what it prepared
itself), so the cached files are found here and read as local ones.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafthead.config import REPO_ROOT, PromptSource
from drafthead.files import sha256_file
from drafthead.generation.sources.catalogue import CATALOGUE, LOCAL, Entry
from drafthead.generation.sources.files import find


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
        if self.config.heldout_share is not None:
            return self.config.heldout_share
        return 0.0 if self.heldout_files else self.entry.heldout_share


def locate(config: PromptSource) -> Located:
    """Find the files of a source.

    Raises:
        FileNotFoundError: they are not on this machine; the message is the command that downloads them.
        ValueError: the name is unknown, or files are missing from a set.
    """
    entry = CATALOGUE.get(config.name) or (LOCAL if config.path else None)
    if entry is None:
        raise ValueError(
            f"prompts.sources: {config.name} is not a known source ({', '.join(CATALOGUE)}); "
            "give it a path to read a file of your own"
        )
    if config.path is not None:
        return _local(config, entry, REPO_ROOT / config.path)
    folder = REPO_ROOT / "data" / "sources" / config.name
    if folder.is_dir():
        return _local(config, entry, folder)
    return _cached(config, entry) if entry.hub else _missing(config, entry)


def download_command(name: str, entry: Entry) -> str:
    """What to run to have a source on this machine."""
    if not entry.hub:
        return entry.fetch.format(folder=REPO_ROOT / "data" / "sources" / name)
    patterns = " ".join(f'--include "{pattern}"' for pattern in (*entry.files, *entry.heldout_files))
    return f"hf download {entry.hub} --repo-type dataset {patterns}"


def _local(config: PromptSource, entry: Entry, path: Path) -> Located:
    if path.is_file():
        files, heldout = [path], []
    elif path.is_dir():
        heldout = find(path, entry.heldout_files)
        files = find(path, entry.files or ("*",))
        if entry.heldout_files and bool(files) != bool(heldout):
            files, heldout = [*files, *heldout], []  # half of the set: split by document
    else:
        raise FileNotFoundError(f"prompts.sources: path {config.path} of {config.name} does not exist ({path})")
    if not files:
        wanted = ", ".join((*entry.files, *entry.heldout_files)) or "*.jsonl, *.json, *.parquet, *.csv"
        raise FileNotFoundError(f"prompts.sources: {path} of {config.name} has no file like {wanted}")
    hashes = {file.name: sha256_file(file) for file in [*files, *heldout]}
    return Located(config, entry, files, heldout, {"files": hashes})


def _cached(config: PromptSource, entry: Entry) -> Located:
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE
    from huggingface_hub.errors import HfHubHTTPError

    patterns, reason = [*entry.files, *entry.heldout_files], "its files are not in the cache"
    for local in (True,) if HF_HUB_OFFLINE else (True, False):
        try:
            folder = Path(
                snapshot_download(entry.hub, repo_type="dataset", allow_patterns=patterns, local_files_only=local)
            )
        except (OSError, HfHubHTTPError) as error:
            reason = str(error).strip().splitlines()[0]
            continue
        files, heldout = find(folder, entry.files), find(folder, entry.heldout_files)
        if files and (heldout or not entry.heldout_files):
            # A snapshot's folder is named by its commit, which fixes every byte in it.
            names = sorted(str(file.relative_to(folder)) for file in [*files, *heldout])
            return Located(config, entry, files, heldout, {"hub": entry.hub, "commit": folder.name, "files": names})
    return _missing(config, entry, reason)


def _missing(config: PromptSource, entry: Entry, reason: str = "it is not on the hub") -> Located:
    raise FileNotFoundError(
        f"prompts.sources: {config.name} is not on this machine ({reason}). On one with a network run\n"
        f"  {download_command(config.name, entry)}\n"
        "or give the source a path to its file or folder"
    )
