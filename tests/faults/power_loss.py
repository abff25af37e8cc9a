"""What a disk may hold after the power failed: the operations of a writer, without those that were not yet synced.

`record` runs commands with faulty_io.c preloaded, which notes every operation on names and every byte written below a
folder. `Losses` rebuilds the folder as a power loss at any place may leave it. What was synced is there: the bytes of a
file after fsync of the file, a name after fsync of its folder. Of everything else any part may be there, in any order:
names that were given later without those given earlier, sizes without the bytes. That is more than journaling file
systems lose, and all that POSIX promises. A rename is one operation: it happened for both folders or for none.
"""

import ctypes
import os
import random
import subprocess
from collections.abc import Iterator, Sequence
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


@dataclass(frozen=True)
class Effect:
    """What an operation changes, and the files and folders any of which makes it last when it is synced.

    Attributes:
        owners: those files and folders, by number.
        names: (folder, name, file, or None where the name goes).
        offset, data: bytes of the one owner.
        size: the one owner is cut to this.
    """

    owners: tuple[int, ...]
    names: tuple[tuple[int, str, int | None], ...] = ()
    offset: int = 0
    data: bytes = b""
    size: int | None = None


class Disk:
    """Folders and files by number; 0 is the recorded folder."""

    def __init__(self) -> None:
        self.folders: dict[int, dict[str, int]] = {0: {}}
        self.files: dict[int, bytearray] = {}

    def apply(self, effect: Effect, zeros: bool = False) -> None:
        """`zeros`: of bytes only the room for them."""
        for folder, name, file in effect.names:
            if file is None:
                self.folders[folder].pop(name, None)
            else:
                self.folders[folder][name] = file
        if effect.data or effect.size is not None:
            content = self.files[effect.owners[0]]
            if effect.size is not None:
                del content[effect.size :]
                content.extend(bytes(effect.size - len(content)))
            content.extend(bytes(max(0, effect.offset + len(effect.data) - len(content))))
            if not zeros:
                content[effect.offset : effect.offset + len(effect.data)] = effect.data

    def tree(self, folder: int = 0, below: str = "") -> dict[str, bytes | None]:
        """Content of every file by its path, None for a folder."""
        found: dict[str, bytes | None] = {}
        for name, number in self.folders[folder].items():
            if number in self.folders:
                found[below + name] = None
                found |= self.tree(number, f"{below}{name}/")
            else:
                found[below + name] = bytes(self.files[number])
        return found


class Losses:
    """The states in which a power loss may leave a folder that was empty before the record."""

    def __init__(self, operations: Sequence[Operation], root: Path):
        self._root, self._whole = root, Disk()
        self._kinds: dict[int, bool] = {0: True}  # number -> whether it is a folder
        self._inodes: dict[int, tuple[int, int, str]] = {}  # inode -> number, folder and name of a file
        self._steps: list[Effect | int | str] = []  # an effect, the number of what was synced, or a mark
        for operation in operations:
            self._follow(operation)

    @property
    def places(self) -> range:
        """Where the power can fail: before every operation, and after the last."""
        return range(len(self._steps) + 1)

    def final(self) -> dict[str, bytes | None]:
        """The tree when nothing is lost."""
        return self._whole.tree()

    def states(self, place: int, chooser: random.Random, count: int) -> Iterator[dict[str, bytes | None]]:
        """Trees that a power loss before operation `place` may leave.

        Everything that was not synced is there, or nothing; each of it is missing alone, or there alone; and `count`
        random choices, in which the bytes of a file may be zeros too.
        """
        steps = self._steps[:place]
        synced = {number: i for i, number in enumerate(steps) if isinstance(number, int)}
        pending = [
            i
            for i, step in enumerate(steps)
            if isinstance(step, Effect) and not any(synced.get(owner, -1) > i for owner in step.owners)
        ]
        # Changes of names one by one; the bytes of a file together.
        units: dict[int, list[int]] = {}
        for i in pending:
            step = steps[i]
            assert isinstance(step, Effect)
            units.setdefault(i if step.names else -1 - step.owners[0], []).append(i)
        choices: list[dict[int, str]] = [{}, dict.fromkeys(units, "lost")]
        choices += [{unit: "lost"} for unit in units]
        choices += [{other: "lost" for other in units if other != unit} for unit in units]
        choices += [{unit: chooser.choice(("", "lost", "zeros")) for unit in units} for _ in range(count)]
        for choice in choices:
            fate = {i: choice.get(unit, "") for unit, members in units.items() for i in members}
            disk = self._empty()
            for i, step in enumerate(steps):
                if isinstance(step, Effect) and fate.get(i) != "lost":
                    disk.apply(step, zeros=fate.get(i) == "zeros")
            yield disk.tree()

    def promised(self, place: int) -> list[str]:
        """The marks before an operation."""
        return [step for step in self._steps[:place] if isinstance(step, str)]

    def _empty(self) -> Disk:
        disk = Disk()
        for number, is_folder in self._kinds.items():
            if is_folder:
                disk.folders[number] = {}
            else:
                disk.files[number] = bytearray()
        return disk

    def _follow(self, operation: Operation) -> None:
        if operation.name == "mark":
            self._steps.append(operation.path)
            return
        if Path(operation.path) == self._root:
            self._steps.append(0) if operation.name == "fsync" else None
            return
        parent, name = self._place(operation.path)
        if operation.name == "rename":
            before, old = self._place(os.fsdecode(operation.data))
            self._rename(before, old, parent, name, self._number(before, old, operation.inode))
        elif operation.name in ("unlink", "rmdir"):
            self._do(Effect((parent,), ((parent, name, None),)))
        elif operation.name == "mkdir":
            self._number(parent, name, operation.inode, is_folder=True)
        elif operation.name != "chmod":
            file = self._number(parent, name, operation.inode)
            if operation.name == "fsync":
                self._steps.append(file)
            elif operation.name == "write":
                self._do(Effect((file,), offset=operation.offset, data=operation.data))
            elif operation.name in ("create", "truncate"):
                self._do(Effect((file,), size=operation.offset))

    def _place(self, path: str) -> tuple[int, str]:
        *folders, name = Path(path).relative_to(self._root).parts
        number = 0
        for folder in folders:
            number = self._whole.folders[number][folder]
        return number, name

    def _number(self, parent: int, name: str, inode: int, is_folder: bool = False) -> int:
        """Of a file or folder, which is made, or renamed, if it is not there: some libraries do so past the C one."""
        if (found := self._whole.folders[parent].get(name)) is not None:
            return found
        if inode in self._inodes:
            number, before, old = self._inodes[inode]
            if self._whole.folders[before].get(old) == number:
                self._rename(before, old, parent, name, number)
                return number
        number = len(self._kinds)
        self._kinds[number] = is_folder
        if is_folder:
            self._whole.folders[number] = {}
        else:
            self._whole.files[number] = bytearray()
        self._inodes[inode] = number, parent, name
        self._do(Effect((parent,), ((parent, name, number),)))
        return number

    def _rename(self, before: int, old: str, parent: int, name: str, file: int) -> None:
        self._do(Effect((before, parent), ((before, old, None), (parent, name, file))))
        for inode, (number, _, _) in self._inodes.items():
            if number == file:
                self._inodes[inode] = file, parent, name

    def _do(self, effect: Effect) -> None:
        self._steps.append(effect)
        self._whole.apply(effect)


def rebuild(tree: dict[str, bytes | None], folder: Path) -> None:
    """Make the files of a tree in an empty folder."""
    for name, content in tree.items():  # a folder comes before what is in it
        if content is None:
            (folder / name).mkdir()
        else:
            (folder / name).write_bytes(content)
