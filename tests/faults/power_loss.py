"""What a disk may forget when the power fails, from a record of a writer's operations.

With faulty_io.c preloaded every operation on names and every byte written below a folder is noted. What was synced
stays: the bytes of a file after fsync of the file, a name after fsync of its folder. Everything else may be lost, in
any order: that is more than journaling file systems lose, and all that POSIX promises.
"""

import ctypes
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

LIBRARY = "DRAFTHEAD_FAULTY_IO"


def build(folder: Path) -> Path:
    """Compile the library."""
    library = folder / "faulty_io.so"
    source = Path(__file__).with_name("faulty_io.c")
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    return library


def preloaded(library: Path) -> dict[str, str]:
    """Variables of the environment of a process that is to have the library."""
    return {
        LIBRARY: str(library), "LD_PRELOAD": str(library), "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


@dataclass(frozen=True)
class Operation:
    """One of the record; of a rename `data` is the name before. `inode` is 0 when the path is gone."""

    name: str
    inode: int
    path: str
    offset: int
    data: bytes


class Recorder:
    """The record of a block of this process, which has the library preloaded."""

    def __init__(self, root: Path, record: Path):
        self._root, self._library = root, ctypes.CDLL(os.environ[LIBRARY])
        self._tape = os.open(record, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND)

    @contextmanager
    def recording(self) -> Iterator[None]:
        self._library.fault_record(os.fsencode(self._root), self._tape)
        try:
            yield
        finally:
            self._library.fault_record(b"", -1)

    def mark(self, text: str) -> None:
        """Note that something was promised: it has to be there from here on."""
        os.write(self._tape, f"mark 0 0 {len(text)} 0\n{text}".encode())


def read_record(record: Path) -> list[Operation]:
    """The operations, in order."""
    content, place, found = record.read_bytes(), 0, []
    while place < len(content):
        start = content.index(b"\n", place) + 1
        name, inode, offset, path_size, size = content[place:start].split()
        middle = start + int(path_size)
        place = middle + int(size)
        path = os.fsdecode(content[start:middle])
        found.append(Operation(name.decode(), int(inode), path, int(offset), content[middle:place]))
    return found


def losses(operations: Sequence[Operation], root: Path) -> tuple[set[str], list[str]]:
    """The names below `root` at the end, and what a power failure may cost of what has its name or was promised.

    Whatever part of the operations that no sync followed a disk forgets, in any order, nothing is lost if
    - a name without a dot is given to what was synced before, its bytes and the names in it;
    - at every mark, and at the end, all such names, those taken away and the bytes behind them are synced.
    """
    inodes: dict[str, int] = {".": 0}  # of every path below root
    unsynced: set[int] = set()  # files with bytes that no sync followed
    pending: set[tuple[str, str]] = set()  # (folder, name) given or taken since the folder was synced
    problems: list[str] = []

    def relative(path: str | bytes) -> str:
        return str(Path(os.fsdecode(path)).relative_to(root))

    def visible(path: str) -> bool:
        return not any(part.startswith(".") for part in Path(path).parts)

    def place(path: str) -> tuple[str, str]:
        return str(Path(path).parent), Path(path).name

    def within(path: str) -> list[str]:
        return [name for name in inodes if name == path or name.startswith(f"{path}/")]

    def move(before: str, path: str) -> None:
        for name in within(before):
            inodes[path + name.removeprefix(before)] = inodes.pop(name)
        pending.update((place(before), place(path)))

    def check(paths: Iterable[str], when: str) -> None:
        paths = set(paths)
        problems.extend(f"bytes of {path} {when}" for path in paths if inodes[path] in unsynced)
        names = [change for change in pending if change[0] in paths and not change[1].startswith(".")]
        problems.extend(f"name {name} in {folder} {when}" for folder, name in names)

    for operation in operations:
        if operation.name == "mark":
            check(filter(visible, inodes), f"when {operation.path} was promised")
            continue
        path = relative(operation.path)
        met = relative(operation.data) if operation.name == "rename" else path
        if met not in inodes and operation.name not in ("chmod", "unlink", "rmdir"):
            # Some libraries rename past the C one.
            before = next((name for name, inode in inodes.items() if inode == operation.inode), None)
            move(before, met) if before else pending.add(place(met))
            inodes[met] = operation.inode
        if operation.name in ("create", "truncate", "write"):
            unsynced.add(operation.inode)
        elif operation.name == "fsync":
            unsynced.discard(operation.inode)
            pending = {change for change in pending if change[0] != path}
        elif operation.name == "rename":
            before = relative(operation.data)
            if visible(path):
                check(within(before), f"when it became {path}")
            move(before, path)
        elif operation.name in ("unlink", "rmdir"):
            unsynced.discard(inodes.pop(path, 0))
            pending.add(place(path))
    check(filter(visible, inodes), "at the end")
    return set(inodes) - {"."}, problems
