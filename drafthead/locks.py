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
TIMEOUT_S = 5.0  # seconds; a killed process may take some to give its GPU's memory back, and its lock with it
_NO_LOCKS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP)
logger = logging.getLogger(__name__)
_held: dict[Path, FileLock] = {}


class InUseError(ValueError):
    """Another process writes into the directory."""


def acquire(directory: Path, name: str = LOCK, timeout_s: float | None = None) -> None:
    """Lock a directory, which is made, against every other process until `release` or the end of this process.

    Args:
        directory: directory to lock, or to lock a part of.
        name: name of the hidden lock file; another name than LOCK locks a part of the directory.
        timeout_s: seconds to wait for the lock; None: TIMEOUT_S.

    Raises:
        InUseError: a process, which is named, holds the lock already; this one counts.
    """
    make_folder(directory)
    path = directory / name
    lock = FileLock(path, TIMEOUT_S if timeout_s is None else timeout_s, thread_local=False, fallback_to_soft=False)
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


def release(directory: Path, name: str = LOCK) -> None:
    """Release the lock of a directory, if this process holds it."""
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
    return "another process"  # or released it
