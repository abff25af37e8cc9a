"""What a server writes down of its requests: figures of every one, tokens of those that may be captured.

    adapt/NAME/counts/    of every request: time, workload, head, lengths, drafts and accepted drafts
    adapt/NAME/captured/  of a sampled share of the requests with consent: the same, with the token ids

Both are folders of segments, files of one JSON record a line, the captured ones encrypted (Fernet: AES-128-CBC with
HMAC-SHA256) where DRAFTHEAD_CAPTURE_KEY holds a key. A record is written by one call, so a killed server loses the
records it had not written and tears at most the last line, which a reader leaves out; a loss of power can take the last
seconds. Segments are deleted whole: when their first record has reached its age, or the oldest when all are too large.
Files are 0600 in folders of 0700. The alternative, a database, would keep deleted text in its pages.
"""

import errno
import importlib
import json
import os
import time
from array import array
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.fernet import Fernet, InvalidToken

Record = dict[str, Any]
Ids = list[int]
Redact = Callable[[Ids, Ids], tuple[Ids, Ids] | None]
KEY = "DRAFTHEAD_CAPTURE_KEY"  # in the environment
_SEGMENT_S, _SEGMENT_BYTES = 3600, 8 << 20
DAY_S = 86_400
REST = "others"  # what small workloads are called together


class CaptureError(ValueError):
    """Captured records cannot be read or written as the settings say."""


def capture_key() -> Fernet | None:
    """The key of captured text, from the environment; None where none is given.

    Raises:
        CaptureError: it is no Fernet key.
    """
    try:
        return Fernet(secret) if (secret := os.environ.get(KEY)) else None
    except ValueError:
        how = "python -c 'from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())'"
        raise CaptureError(f"{KEY} is no Fernet key; make one with: {how}") from None


def redaction(name: str | None) -> Redact:
    """The hook `package.module:function`: of prompt and response ids what may be stored of them, or None for nothing.

    Raises:
        CaptureError: there is no such function.
    """
    if name is None:
        return lambda prompt, response: (prompt, response)
    module, _, function = name.partition(":")
    try:
        return getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise CaptureError(f"adapt.redact {name}: {error}; give package.module:function") from error


@dataclass
class Log:
    """Records in segments; one process writes, others may read.

    Attributes:
        directory: directory of the segments.
        key: key that records are encrypted with; None: they are stored as plain text.
    """

    directory: Path
    key: Fernet | None = None
    _file: int = -1  # none is open
    _begun: float = 0.0
    _size: int = 0
    _after: tuple[str, int] = ("", 0)  # the segment read last, and the bytes of it that were read

    def append(self, record: Record) -> None:
        """Write a record, whole or torn at the end of its segment."""
        line = json.dumps(record, separators=(",", ":")).encode()
        line = (self.key.encrypt(line) if self.key else line) + b"\n"
        if time.time() - self._begun > _SEGMENT_S or self._size > _SEGMENT_BYTES:
            self._begin_segment()
        self._size += (written := os.write(self._file, line))
        if written < len(line):
            self._begun = 0.0  # the next record must not follow half of one
            raise OSError(errno.ENOSPC, "a record was cut short", str(self.directory))

    def _begin_segment(self) -> None:
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        now, before = time.time(), self._file
        path = self.directory / f"{int(now * 1e6):018d}-{os.getpid()}.log"
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._begun, self._size = now, 0
        if before >= 0:
            os.close(before)

    def segments(self) -> list[Path]:
        """From the oldest on."""
        return sorted(self.directory.glob("*.log"))

    def read(self) -> list[Record]:
        """Records since the last call, from the oldest on.

        Raises:
            CaptureError: a record was encrypted with another key, or without one.
        """
        records: list[Record] = []
        after = self._after
        for path in self.segments():
            if path.name < after[0]:
                continue
            begin = after[1] if path.name == after[0] else 0
            with suppress(FileNotFoundError), path.open("rb") as file:  # its age may be reached meanwhile
                file.seek(begin)
                text = file.read()
                whole = text[: text.rfind(b"\n") + 1]  # what follows is being written, or was torn by a kill
                records += [self._parse(line, path) for line in whole.splitlines()]
                after = path.name, begin + len(whole)
        self._after = after
        return records

    def _parse(self, line: bytes, path: Path) -> Record:
        try:
            record = json.loads(self.key.decrypt(line) if self.key else line)
            # A reader keeps all that is retained: 4 bytes a token, where a list takes 36.
            return record | {
                name: array("i", record[name]) for name in ("prompt_ids", "response_ids") if name in record
            }
        except (InvalidToken, ValueError):
            held = "another key" if self.key else "a key"
            raise CaptureError(
                f"{path} holds a record that does not read: it was written with {held}; set {KEY} to that, or delete it"
            ) from None

    def purge(self, days: float, most_bytes: int = 4 << 30) -> None:
        """Delete segments whose first record is older than `days`, then the oldest while they exceed `most_bytes`."""
        oldest, left = time.time() - days * DAY_S, self.segments()
        with suppress(FileNotFoundError):  # another process deletes them, too
            while left and (
                int(left[0].name.split("-")[0]) / 1e6 < oldest
                or (len(left) > 1 and sum(p.stat().st_size for p in left) > most_bytes)  # the last is being written
            ):
                left.pop(0).unlink()
