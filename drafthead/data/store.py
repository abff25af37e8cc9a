"""The store of hidden states: what the target thought at every position of its own text.

A store is a directory of shards (see data.shard, which says what is in one). Reading maps the files and copies only
the sequence asked for. One file per request, the usual alternative, costs an open, a header and a rename for every
few kilobytes.
"""

from pathlib import Path
from typing import Protocol

from torch import Tensor

from drafthead.data.shard import Format, Shard, StateSequence, open_checked, shard_path, write_shard
from drafthead.provenance import ArtefactError

__all__ = [
    "KIND", "Format", "Shard", "StateSequence", "StateStore", "States", "open_checked", "shard_path", "write_shard",
]  # fmt: skip

KIND = "states"


class States(Protocol):
    """What training reads: documents with their states. Texts are known from the start, states may come later.

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
        ArtefactError: the directory has no shard, one is damaged, or they are not of one harvest.
    """

    def __init__(self, directory: Path):
        paths = sorted(directory.glob("shard-*.safetensors"))
        if not paths:
            raise ArtefactError(f"{directory} has no shards; run: python data_gen/harvest.py RECIPE")
        self._shards = [Shard(path) for path in paths]
        for shard in self._shards[1:]:
            _check_alike(self._shards[0], shard)
        self._index = [(shard, i) for shard in self._shards for i in range(len(shard))]
        self.aux_layer_ids = self._shards[0].aux_layer_ids
        self.ids = [name for shard in self._shards for name in shard.ids]
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
            raise ArtefactError(
                f"{first.path} and {other.path.name} are of two harvests: {name} {getattr(first, name)} and "
                f"{getattr(other, name)}; delete the one that does not belong there and harvest again"
            )
