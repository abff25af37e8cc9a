"""The spool: training shards that exist only between the harvester that writes them and the trainer that reads them.

Online training is offline training over a store of bounded size. Shards are numbered on through the epochs (epoch e,
shard i of S: index e * S + i). The harvester and the trainer run at the same time, are started in any order, and
share nothing but this directory:

    identity.json            what the states are made from, capacity and epochs
    progress.json            the first index that training still needs; the trainer alone writes it
    shard-00007.safetensors  only indices in [first needed, first needed + capacity)
    .shard-8.lock            held by the harvester that writes it; there may be several
    .progress.lock           held by the run that trains; another one would delete what this one needs
    manifest.json            every shard has been written once

The trainer deletes a shard when a checkpoint covers everything trained from it, so that either side finds what it
needs after a kill. Tokens exist before any state, so the order of training is known before the first shard: documents
are shuffled within groups of shards that fill half the spool, one half being read while the other is written.

Given up: an even shuffle of the whole epoch, and a second use of a shard; every epoch harvests again. When the store
fits on disk, the ordinary store is better. On several nodes the spool lies on a file system that all of them and the
harvester share, with renames that are atomic for all; rank 0 alone deletes.
"""

from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafthead import locks
from drafthead.artifacts import read_json
from drafthead.config import Recipe
from drafthead.data.responses import ResponseTokens
from drafthead.data.shard import Sequences, Shard, StateSequence, open_checked, shard_path
from drafthead.data.store import StateStore
from drafthead.files import write_json

KIND = "spool"
PROGRESS_LOCK = ".progress.lock"
_PROGRESS = "progress.json"


@dataclass(frozen=True)
class Spool:
    """A directory with at most `capacity` shards of a stream of `epochs` times `num_shards`."""

    directory: Path
    capacity: int
    num_shards: int
    epochs: int

    @property
    def total(self) -> int:
        """Shards of all epochs."""
        return self.num_shards * self.epochs

    def path(self, index: int) -> Path:
        """Where a shard lies while it exists."""
        return shard_path(self.directory, index)

    def present(self) -> set[int]:
        """Indices of the shards on disk."""
        return {int(path.stem.removeprefix("shard-")) for path in self.directory.glob("shard-*.safetensors")}

    def first_needed(self) -> int:
        """The first index that training still needs; `total` when it has finished."""
        path = self.directory / _PROGRESS
        return read_json(path)["first_needed"] if path.exists() else 0

    def demand(self, in_flight: AbstractSet[int] = frozenset()) -> int | None:
        """Index of the shard to write next; None when there is no room for it, `total` when nothing is left to write.

        Args:
            in_flight: shards handed to the disk that may not be there yet.
        """
        # Shards are listed before progress is read: one that is used up in between then counts as used, not missing.
        present = self.present() | in_flight
        first = self.first_needed()
        stop = min(first + self.capacity, self.total)
        missing = next((index for index in range(first, stop) if index not in present), None)
        if missing is None and stop == self.total:
            return self.total
        return missing if len(present) < self.capacity else None

    def release(self, first_needed: int) -> None:
        """Publish progress, then delete every shard that is no longer needed; for the trainer's rank 0.

        Progress can go back, when a damaged checkpoint makes training fall back on an older one: the harvester then
        writes again what was deleted, and shards too far ahead make room for it here.
        """
        if first_needed != self.first_needed():
            write_json(self.directory / _PROGRESS, {"first_needed": first_needed, "total": self.total})
        for index in self.present():
            if not first_needed <= index < first_needed + self.capacity:
                self.path(index).unlink(missing_ok=True)

    def claim(self, mine: AbstractSet[int] = frozenset()) -> int | None:
        """As `demand`, claimed until `release_claim` or the end of this process: no other harvester will write it.

        Args:
            mine: shards that this harvester has claimed.

        Returns:
            `total` only when no other harvester is still writing: if it were killed, its shard would be claimed here.
        """
        while True:
            claimed_elsewhere = self.in_work() - mine
            index = self.demand(mine | claimed_elsewhere)
            if index == self.total and max(claimed_elsewhere, default=-1) >= self.first_needed():
                return None
            if index is None or index == self.total:
                return index
            with suppress(locks.InUseError):  # another harvester was faster
                locks.acquire(self.directory, _lock(index), timeout_s=0)
                if index >= self.first_needed() and not self.path(index).exists():
                    return index
                self.release_claim(index)  # it was written in between

    def release_claim(self, index: int) -> None:
        """Release the claim on a shard, which is on disk."""
        locks.release(self.directory, _lock(index))

    def in_work(self) -> set[int]:
        """Indices that a living harvester has claimed; claims of killed ones go."""
        indices = set()
        for path in self.directory.glob(_lock("*")):
            try:
                locks.acquire(self.directory, path.name, timeout_s=0)
            except locks.InUseError:
                indices.add(int(path.stem.removeprefix(".shard-")))
            else:
                locks.release(self.directory, path.name)
        return indices


def _lock(index: int | str) -> str:
    return f".shard-{index}.lock"


def open_spool(recipe: Recipe, num_documents: int) -> Spool:
    """The spool of a recipe's training split, whose directory exists."""
    assert recipe.states.spool_shards is not None
    num_shards = -(-num_documents // recipe.states.sequences_per_shard)
    return Spool(recipe.states_dir("train"), recipe.states.spool_shards, num_shards, recipe.train.epochs)


def terms(recipe: Recipe) -> dict[str, Any]:
    """What harvester and trainer must agree on, part of the spool's identity."""
    sizes = recipe.states.model_dump(include={"spool_shards", "sequences_per_shard"})
    return {**sizes, "epochs": recipe.train.epochs}


class SpooledStates(Sequences):
    """The documents of a spool, read like those of a store (see data.store.StateStore): tokens from the responses,
    states from the shards that are there.

    Document d of epoch e has the index e * N + d, N being the documents of one epoch, so its states lie in a shard
    of its own epoch.
    """

    def __init__(self, spool: Spool, responses: ResponseTokens, sequences_per_shard: int, aux_layer_ids: Sequence[int]):
        self.spool = spool
        self.aux_layer_ids = list(aux_layer_ids)
        self.ids = responses.ids
        self.epoch_stride = len(self.ids)  # an epoch's documents follow those of the epoch before
        self._responses = responses
        self._size = sequences_per_shard
        self._open: dict[int, Shard] = {}
        step = max(1, spool.capacity // 2) * sequences_per_shard
        self.groups = [range(start, min(start + step, len(self))) for start in range(0, len(self), step)]

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Token ids (T,) int64 and loss mask (T,) uint8 of a document, without its states."""
        ids, mask = self._responses.tokens(index % len(self))
        return torch.from_numpy(ids), torch.from_numpy(mask)

    def shard_of(self, index: int) -> int:
        """The spool index of a document's shard."""
        epoch, document = divmod(index, len(self))
        return epoch * self.spool.num_shards + document // self._size

    def stored(self, index: int) -> StateSequence:
        """A document with its states as they are stored.

        Raises:
            FileNotFoundError: its shard is not written yet.
            ArtifactError: its shard is damaged.
        """
        number = self.shard_of(index)
        if number not in self._open:
            start = number % self.spool.num_shards * self._size
            self._open[number] = open_checked(self.spool.path(number), self.ids[start : start + self._size])
        return self._open[number].stored(index % len(self) % self._size)

    def close_before(self, first_needed: int) -> None:
        """Close shards that are no longer needed, so that deleting them frees their space."""
        for number in list(self._open):  # a copy: the thread that reads ahead may be opening one
            if number < first_needed:
                self._open.pop(number)


States = StateStore | SpooledStates  # what training reads: tokens are known from the start, states may come later
