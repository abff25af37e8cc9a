"""Running out of disk: said before a file is begun where possible, and cleanly where it happens on the way."""

import errno
import shutil
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


def ran_out(error: Exception) -> bool:
    """Whether a write failed for want of room; safetensors gives the system's code in its message only."""
    if isinstance(error, OSError):
        return error.errno in _CODES
    return any(f"os error {code})" in str(error) for code in _CODES)


def out_of_space(path: Path, needed: int, reason: str = "") -> str:
    """What a user wants to know: needed and free bytes, what is safe, what to do."""
    intact = sum(1 for _ in path.parent.glob(f"*{path.suffix}"))
    because = f" ({reason})" if reason else ""
    return (
        f"no room for {path}{because}: it needs {needed:,} bytes and {shutil.disk_usage(path.parent).free:,} are free; "
        f"{intact} shards before it are intact. Make room and run the same command, which continues there; or begin "
        "again under another output_dir or with states.format=fp8"
    )
