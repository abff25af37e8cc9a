"""SHA-256 of a shard, noted beside it by whoever wrote it, until the store's manifest holds it.

The note is there before the shard has its name, so a resumed harvest can tell a changed byte, and finishing a store
reads no shard again: many writers hash in parallel what is still in memory, where the one that finishes would read
terabytes back. The notes are hidden files in the form of `sha256sum`: in a half-finished store,
`sha256sum -c .shard-*.sha256` checks them too.
"""

from pathlib import Path

from drafthead.files import atomic_path, sha256_file
from drafthead.provenance import ArtefactError


def note(path: Path, written: Path) -> None:
    """Note the SHA-256 of what is about to be renamed.

    Args:
        path: the name that the shard will have.
        written: where its bytes are now.
    """
    with atomic_path(_beside(path)) as temporary:
        temporary.write_text(f"{sha256_file(written)}  {path.name}\n")


def noted(path: Path) -> str | None:
    """The SHA-256 that was noted for a shard, if it was."""
    try:
        return _beside(path).read_text().split()[0]
    except FileNotFoundError:
        return None


def check(path: Path) -> None:
    """Read a shard and compare it with its note, if it has one.

    Raises:
        ArtefactError: the bytes are not the ones that were written.
        FileNotFoundError: the shard does not exist.
    """
    wanted = noted(path)
    if wanted is not None and (found := sha256_file(path)) != wanted:
        raise ArtefactError(
            f"{path} has SHA-256 {found[:12]}... and had {wanted[:12]}... when it was written: its bytes were changed; "
            "delete it and harvest again"
        )


def move_note(path: Path, new: Path) -> None:
    """Note a shard's SHA-256 for the name that it is about to get."""
    if (known := noted(path)) is not None:
        with atomic_path(_beside(new)) as temporary:
            temporary.write_text(f"{known}  {new.name}\n")


def forget(path: Path) -> None:
    """Remove the note of a shard."""
    _beside(path).unlink(missing_ok=True)


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.stem}.sha256")
