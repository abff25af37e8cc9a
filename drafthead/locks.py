"""One process at a time writes into a directory; a second one gets an error that names the first.

The lock is the kernel's (flock), on a hidden file with the holder's host and process id. It ends with its process,
SIGKILL included, so a killed stage never blocks the command that resumes it. A file system without locks (Lustre
mounted without `flock`, for example) gets a warning instead.
"""

import errno
import logging
import os
import socket
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from filelock import FileLock, Timeout

from drafthead.files import make_folder

LOCK = ".lock"
PATIENCE = 5.0  # seconds; a killed process may take some to give its GPU's memory back, and its lock with it
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
logger = logging.getLogger(__name__)
_held: dict[Path, FileLock] = {}


class InUseError(ValueError):
    """Another process writes into the directory."""


def hold(directory: Path, name: str = LOCK, patience: float | None = None) -> None:
    """Keep every other process out of a directory, which is made, until `let_go` or the end of this process.

    Args:
        directory: or, with a name of its own, a part of it.
        name: of the hidden file.
        patience: seconds to wait for it; None: PATIENCE.

    Raises:
        InUseError: a process, which is named, holds it; this one counts.
    """
    make_folder(directory)
    path = directory / name
    timeout = PATIENCE if patience is None else patience
    lock = FileLock(path, timeout, thread_local=False, fallback_to_soft=False)
    try:
        if holds(directory, name):
            raise Timeout(str(path))
        lock.acquire()
    except Timeout:
        raise InUseError(
            f"{_holder(path)} is writing into {directory}: wait until it ends, or end it; the same command then "
            "continues. To work beside it, give the recipe another name (name=...)"
        ) from None
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        _warn(directory)
        return
    path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    _held[directory.resolve() / name] = lock


def holds(directory: Path, name: str = LOCK) -> bool:
    """Whether this process holds the directory."""
    return directory.resolve() / name in _held


def let_go(directory: Path, name: str = LOCK) -> None:
    """Let other processes in again, if this one kept them out."""
    if lock := _held.pop(directory.resolve() / name, None):
        (directory / name).unlink(missing_ok=True)  # still locked: whoever opened it meanwhile finds it without a name
        lock.release()


@lru_cache
def _warn(directory: Path) -> None:
    """Once: of a spool every shard is locked."""
    logger.warning("%s: its file system has no locks; make sure that no second process writes there", directory)


def _holder(path: Path) -> str:
    with suppress(OSError):
        return path.read_text() or "another process"  # it has just been taken
    return "another process"  # or let go
