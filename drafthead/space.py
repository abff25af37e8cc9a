"""Running out of disk: said before a file is begun where possible, and cleanly where it happens on the way."""

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CODES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class DiskFullError(ValueError):
    """A file does not fit, or could not be written to its end; nothing partial is left under its name."""


def check_space(path: Path, needed: int) -> None:
    """See that `needed` bytes fit beside what is there already.

    Raises:
        DiskFullError: they do not.
    """
    if shutil.disk_usage(path.parent).free < needed:
        raise DiskFullError(out_of_space(path, needed))


def ran_out(error: BaseException) -> bool:
    """Whether a write failed for want of room; safetensors gives the system's code in its message only."""
    if isinstance(error, OSError):
        return error.errno in _CODES
    return any(f"os error {code})" in str(error) for code in _CODES)


@contextmanager
def told_when_full(path: Path, temporary: Path) -> Iterator[None]:
    """Turn a write that finds no room into one error, whichever library was writing.

    Args:
        path: the name that the file was to have.
        temporary: what is being written.

    Raises:
        DiskFullError: there was no room.
    """
    try:
        yield
    except Exception as error:
        if not ran_out(error):
            raise
        written = temporary.stat().st_size if temporary.exists() else 0
        raise DiskFullError(out_of_space(path, written, str(error))) from error


def out_of_space(path: Path, needed: int, reason: str = "") -> str:
    """What a user wants to know: needed and free bytes, what is safe, what to do.

    Args:
        path: of what does not fit.
        needed: bytes; where a reason is given, those that had been written when it stopped.
        reason: how a write that was begun failed.
    """
    because = f" ({reason})" if reason else ""
    more = "more than " if reason else ""
    return (
        f"no room for {path}{because}: it needs {more}{needed:,} bytes and {shutil.disk_usage(path.parent).free:,} are "
        "free; what was finished before is intact. Make room and run the same command, which continues there; or begin "
        "again under another output_dir"
    )
