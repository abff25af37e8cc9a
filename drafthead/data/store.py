"""The store of hidden states: a directory of shards (see data.shard), read on demand and verified as a whole.

Reading maps the files and copies only the sequence that is needed. One file per request, the usual alternative, costs
an open, a header and a rename for every few kilobytes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from drafthead.data.shard import (
    Format, Shard, StateSequence, first_teacher_row, open_checked, shard_path, write_shard,
)  # fmt: skip
from drafthead.artifacts import IDENTITY, MANIFEST, ArtifactError, read_json, read_manifest, verify_files

__all__ = [
    "KIND", "Format", "Shard", "StateSequence", "StateStore", "States", "open_checked", "shard_path", "write_shard",
]  # fmt: skip

KIND = "states"


class States(Protocol):
    """What training reads: documents with their states. Tokens are known from the start, states may come later.

    Attributes:
        aux_layer_ids: aux layers of every document, ascending.
        ids: prompt id of every document.
        groups: which documents may be shuffled together, as ranges that cover all of them in order.
    """

    aux_layer_ids: list[int]
    ids: list[str]
    groups: list[range]

    def __len__(self) -> int:
        """Documents of one epoch."""

    def __getitem__(self, index: int) -> StateSequence:
        """A document with its states; `index` counts on through the epochs by `offset`."""

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Token ids (T,) int64 and loss mask (T,) bool of a document, without its states."""

    def offset(self, epoch: int) -> int:
        """What is added to a document's index in an epoch."""


class StateStore:
    """All sequences of a store in shard order, read on demand.

    Raises:
        ArtifactError: the directory has no shard, one is damaged, or they are not of one harvest.
    """

    def __init__(self, directory: Path):
        paths = sorted(directory.glob("shard-*.safetensors"))
        if not paths:
            raise ArtifactError(f"{directory} has no shards; run: python data_gen/harvest.py RECIPE")
        shards = [Shard(path) for path in paths]
        for shard in shards[1:]:
            _check_alike(shards[0], shard)
        self._index = [(shard, i) for shard in shards for i in range(len(shard))]
        self.aux_layer_ids = shards[0].aux_layer_ids
        self.ids = [name for shard in shards for name in shard.ids]
        self.groups = [range(len(self._index))]

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, index: int) -> StateSequence:
        shard, position = self._index[index]
        return shard[position]

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Token ids (T,) int64 and loss mask (T,) bool of a sequence, without its states."""
        shard, position = self._index[index]
        return shard.rows(position, "input_ids").long(), shard.rows(position, "loss_mask").bool()

    def offset(self, epoch: int) -> int:
        """Every epoch reads the same shards."""
        return 0


def _check_alike(first: Shard, other: Shard) -> None:
    for name in ("aux_layer_ids", "number_format"):
        if getattr(first, name) != getattr(other, name):
            raise ArtifactError(
                f"{first.path} and {other.path.name} are of two harvests: {name} {getattr(first, name)} and "
                f"{getattr(other, name)}; delete the one that does not belong there and harvest again"
            )


def verify_store(directory: Path) -> list[str]:
    """What is broken in a finished store: a line per problem, each naming the file; none when it is whole.

    Every byte is read twice. The manifest's SHA-256 finds what was changed since the store was published; the shards'
    own checksums find what was changed between writing and publishing; the values, states that were wrong from the
    start (not finite, or teacher rows missing).
    """
    if not (directory / MANIFEST).exists():
        state = "is half finished" if directory.exists() else "does not exist"
        return [f"{directory} {state}; run: python data_gen/harvest.py RECIPE"]
    try:
        manifest = read_manifest(directory)
        listed, identity = manifest["files"], manifest["identity"]
        problems = [] if read_json(directory / IDENTITY) == identity else [f"{IDENTITY} differs from {MANIFEST}"]
        problems += [_file_problem(directory / name, listed[name]) for name in verify_files(directory)]
    except (ArtifactError, FileNotFoundError, KeyError, TypeError) as error:
        return [f"{directory / MANIFEST} cannot be read: {error}"]
    found = {path.name for path in directory.glob("shard-*.safetensors")}
    problems += [f"{name} is not in {MANIFEST}" for name in sorted(found - set(listed))]
    return problems + [problem for name in sorted(found) for problem in verify_shard(directory / name, identity)]


def _file_problem(path: Path, listed: dict[str, Any]) -> str:
    if not path.is_file():
        return f"{path.name} is missing"
    if (size := path.stat().st_size) != listed["bytes"]:
        return f"{path.name} has {size:,} bytes, {MANIFEST} lists {listed['bytes']:,}"
    return f"{path.name} has another SHA-256 than {MANIFEST} lists: its bytes were changed after the harvest"


def verify_shard(path: Path, identity: dict[str, Any]) -> list[str]:
    """What is wrong inside one shard.

    Args:
        path: of the shard.
        identity: of its store; aux layer ids, number format and hidden size are compared where it names them.
    """
    try:
        shard = Shard(path)
        stored = {
            "aux_layer_ids": shard.aux_layer_ids, "format": shard.number_format, "hidden_size": shard.hidden_size,
        }  # fmt: skip
        problems = [
            f"{name} is {value}, {IDENTITY} has {identity[name]}"
            for name, value in stored.items()
            if identity.get(name, value) != value
        ]
        problems += [problem for i in range(len(shard)) for problem in _sequence_problems(shard[i])]
    except ArtifactError as error:
        return [str(error)]
    return [f"{path.name}: {problem}" for problem in problems]


def _sequence_problems(sequence: StateSequence) -> Iterator[str]:
    """Numbers that are not finite, impossible values, teacher rows that begin too late."""
    states = {f"aux.{layer_id}": rows for layer_id, rows in sequence.aux.items()}
    wrong = {
        **{name: ~rows.isfinite() for name, rows in states.items()},
        "last_hidden": ~sequence.last_hidden.isfinite(),
        "lse": ~sequence.lse.isfinite(),
        "loss_mask": sequence.loss_mask > 1,
        "input_ids": sequence.input_ids < 0,
        "argmax": sequence.argmax < 0,
    }
    for name, where in wrong.items():
        if where.any():
            row = int(where.nonzero()[0, 0])
            yield f"{name} of sequence {sequence.id} is not finite or out of range at row {row}"
    if sequence.first_teacher_row > (wanted := first_teacher_row(sequence.loss_mask)):
        yield f"sequence {sequence.id} has teacher rows from token {sequence.first_teacher_row} on, wanted {wanted}"
