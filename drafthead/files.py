"""Files that are whole or absent (written aside, synced to disk, and renamed), and disks that are full."""

import errno
import glob
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NoReturn

from pydantic import ValidationError
from safetensors import SafetensorError

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

# What to do about an error of the operating system; of any other: look at the disk.
_ADVICE = {
    errno.ENAMETOOLONG: "shorten that name (name, output_dir)",
    errno.EROFS: "give a folder that can be written (output_dir=...)",
    errno.EACCES: "give yourself the right to it, or another path",
    errno.EMFILE: "raise the limit on open files (ulimit -n) and run the same command, which continues",
    errno.ENOENT: "make it, or give another path",
    errno.ENOTDIR: "give another path",
    errno.EISDIR: "give another path",
    errno.ELOOP: "fix the symbolic links in this path, or give another path",
}
_LOOK = "look at its disk, and run the same command, which continues"


class DiskFullError(ValueError):
    """A file does not fit, or could not be written to its end; nothing partial is left under its name."""


class ForeignFileError(ValueError):
    """A file that others made is damaged, or of another kind than its name says."""


def check_space(path: Path, needed: int) -> None:
    """See that `needed` bytes fit beside what is there already.

    Raises:
        DiskFullError: they do not.
    """
    if shutil.disk_usage(path.parent).free < needed:
        raise _disk_full(path, f"it needs {needed:,} bytes")


def ran_out(error: BaseException) -> bool:
    """Whether a write failed for want of room; safetensors gives the system's code in its message only."""
    if isinstance(error, OSError):
        return error.errno in _DISK_FULL
    return any(f"os error {code})" in str(error) for code in _DISK_FULL)


# How torch's own readers and writers say that a file failed, and vLLM that a folder could not be listed.
_TORCH_FILE = re.compile(
    r"unable to (open|mmap|stat|map) |PytorchStream|unexpected pos|cannot be opened|^Parent directory |iostream error"
    r"|^Cannot find any model weights"
)


def from_torch_file(error: RuntimeError) -> bool:
    """Whether torch or vLLM means a file that could not be read or written: they have no other type for that."""
    return _TORCH_FILE.search(str(error)) is not None


def describe(error: Exception) -> str:
    """One message for what the operating system, or safetensors, says of a file, and what to do.

    Errors that this project raises itself have no code and say all that already.
    """
    message, code = str(error), getattr(error, "errno", None)
    if isinstance(error, OSError) and code is None:
        return f"{type(error).__name__}: {message}"
    if ran_out(error):
        return f"DiskFullError: {message}; make room and run the same command, which continues"
    if isinstance(error, SafetensorError) and "os error" not in message:
        advice = "it is damaged or cut short: delete it and make it again, or fetch it again"
    else:
        advice = _ADVICE.get(code or 0, _LOOK)
    return f"{type(error).__name__}: {message}; {advice}"


_REFUSALS = (ValueError, ImportError, ModuleNotFoundError, NotImplementedError)


@contextmanager
def reading_external(
    path: object, fix: str, error_type: type[ValueError] = ForeignFileError, unsupported: str = ""
) -> Iterator[None]:
    """Read what others wrote: a library may answer a malformed file with any exception, which becomes one error.

    A plain ValueError, ImportError or NotImplementedError is what a library, or this project, says of a file that it
    could read and does not take: such a refusal is passed on in its own words, not as damage.

    Args:
        path: path of the file or directory, for the message.
        fix: what the user should do about a damaged file, for the message.
        error_type: type of the error to raise.
        unsupported: what the user should do about a refusal; empty: `fix`.

    Raises:
        ForeignFileError: or `error_type`, for whatever the block raises; errors of the operating system pass unchanged.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, OSError) and (error.errno is not None or isinstance(error, FileNotFoundError)):
            raise
        message = str(error)
        if isinstance(error, ValidationError):  # which writes four lines about each problem
            message = "; ".join(f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in error.errors())
        if type(error) in _REFUSALS:
            raise error_type(f"{path}: {message.strip().removesuffix('.')}. {unsupported or fix}") from error
        raise error_type(f"{path} cannot be read ({type(error).__name__}: {message}). {fix}") from error


def _disk_full(path: Path, why: str) -> DiskFullError:
    """That there is no room for `path`, how much is free, what is safe, and what to do."""
    return DiskFullError(
        f"no room for {path} ({why}): {shutil.disk_usage(path.parent).free:,} bytes are free; what was finished before "
        "is intact. Make room and run the same command, which continues there; or begin again under another output_dir"
    )


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def atomic_path(path: Path, needed: int = 0) -> Iterator[Path]:
    """A temporary name, synced and renamed to `path` when the block ends without an error.

    It lies in a hidden folder of its own beside `path`, because a library may write a temporary file beside the name
    it is given (safetensors 0.8: `.tmpXXXXXX`), which could not be told from another writer's. The folder is removed
    before `path` exists, so that a killed writer leaves nothing beside a complete file.

    Others may write the same content under this name. Whoever is done removes the temporary files of all, those of
    killed writers among them, and a writer without its own ends without an error where the file is there.

    Args:
        path: the name that the file gets.
        needed: bytes that must be free before the block begins.

    Raises:
        DiskFullError: they are not, or the block found no room to write.
    """
    make_folder(path.parent)
    if shutil.disk_usage(path.parent).free < needed:
        remove_leftovers(path)  # now, not once this file is complete
    check_space(path, needed)
    # Random: writers on several machines have the same process ids.
    mark = secrets.token_hex(4)
    aside, whole = (path.with_name(f".{path.name}.{mark}{kind}.tmp") for kind in ("", ".whole"))
    temporary = aside / path.name
    aside.mkdir()
    try:
        yield temporary
        mode = aside.stat().st_mode & 0o644  # as the umask allows
        os.replace(temporary, whole)
        remove_aside(aside)
        whole.chmod(mode)  # some writers create files that only their owner can read
        sync(whole)
        os.replace(whole, path)
    except Exception as error:  # libraries differ in what they raise where a folder is gone
        if ran_out(error):
            remove_leftovers(path)  # so that the next try has their room
            raise _disk_full(path, str(error)) from error
        if aside.exists() or whole.exists() or not path.exists():
            raise
    finally:
        remove_aside(aside)
        remove_aside(whole)
    sync(path.parent)
    remove_leftovers(path)


def remove_leftovers(path: Path) -> None:
    """Delete the temporary files that other writers of `path`, or killed ones, have beside it."""
    for aside in path.parent.glob(f".{glob.escape(path.name)}.*.tmp"):
        with suppress(OSError):  # first, so that its writer does not find the folder without its file
            aside = aside.replace(aside.with_suffix(".gone.tmp"))
        remove_aside(aside)


def remove_aside(path: Path) -> None:
    """Delete a folder or file of `atomic_path`, if it is there."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def delete_folder(path: Path) -> None:
    """Delete a folder; of a link to one only the link."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, onerror=_with_whole_path)


def _with_whole_path(_function: object, path: str, exc_info: tuple[Any, Any, Any]) -> NoReturn:
    """By itself rmtree names a file relative to a folder that it has open."""
    raise OSError(exc_info[1].errno, exc_info[1].strerror, path) from exc_info[1]


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are missing; their names survive a loss of power, too."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
        sync(path.parent)


def sync(path: Path) -> None:
    """Flush a file or directory to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    with atomic_path(path) as temporary:
        temporary.write_text(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")


# Of Markdown: what is markup wherever it stands, an underscore that does not stand within a word, a bracket that may
# end the text of a link, and what begins a heading, a list or a quotation.
_MARKUP = re.compile(r"[\\`*|~$]|(?<![^\W_])_|_(?![^\W_])|\](?=[(\[:])|^[#>]|^[-+](?=\s)")


def in_markdown(text: object) -> str:
    """Foreign text for a table or a list: no markup, no HTML, no formulas, no line breaks."""
    line = " ".join(str(text).splitlines()).strip().replace("&", "&amp;").replace("<", "&lt;")
    return _MARKUP.sub(lambda match: f"\\{match[0]}", line)
