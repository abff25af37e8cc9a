"""Files that are whole or absent: written aside, synced to disk, and renamed."""

import glob
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drafthead.space import told_when_full


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def atomic_path(path: Path, several_writers: bool = False) -> Iterator[Path]:
    """A temporary name, synced and renamed to `path` when the block ends without an error.

    It lies in a hidden folder of its own beside `path`, because a writer may have its own way of being atomic:
    safetensors 0.8 writes `.tmpXXXXXX` beside the name it is given, which nobody could tell from another writer's. The
    folder is gone before `path` is there: whoever is killed leaves nothing beside a file that no one writes again.

    Args:
        path: the name that the file gets.
        several_writers: others may write the same content under this name, and remove ours once theirs is there.
            Otherwise nobody else writes this name, and what a killed writer left aside is removed.

    Raises:
        DiskFullError: the block found no room to write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if not several_writers:
        remove_leftovers(path)
    # Random: writers on several machines have the same process ids.
    mark = secrets.token_hex(4)
    aside, whole = (path.with_name(f".{path.name}.{mark}{kind}.tmp") for kind in ("", ".whole"))
    temporary = aside / path.name
    try:
        with told_when_full(path, temporary):
            aside.mkdir()
            yield temporary
        os.replace(temporary, whole)
        shutil.rmtree(aside)
        whole.chmod(0o644)  # some writers create files that only their owner can read
        sync(whole)
        os.replace(whole, path)
        sync(path.parent)
    except FileNotFoundError:
        if not (several_writers and path.exists()):
            raise
    finally:
        remove_aside(aside)
        remove_aside(whole)


def remove_leftovers(path: Path) -> None:
    """Delete what writers of `path` that were killed left beside it."""
    for aside in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        remove_aside(aside)


def remove_aside(path: Path) -> None:
    """Delete a folder or file of `atomic_path`, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def delete_folder(path: Path) -> None:
    """Delete a folder; of a link to one only the link, since what lies elsewhere was put there by somebody."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def sync(path: Path) -> None:
    """Flush a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any, several_writers: bool = False) -> None:
    """Write a JSON file whole or not at all; `several_writers` as for `atomic_path`."""
    with atomic_path(path, several_writers) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def in_markdown(text: object) -> str:
    """Somebody's words as plain text in a table or a list: no markup, no HTML, no line of its own."""
    return str(text).replace("&", "&amp;").replace("<", "&lt;").replace("|", "\\|").replace("\n", " ")
