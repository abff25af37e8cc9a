"""Reading documents out of a spool as out of a store: texts from the responses, states from shards that come and go."""

from collections.abc import Sequence

import torch
from torch import Tensor

from drafthead.data.responses import Texts
from drafthead.data.spool import Spool
from drafthead.data.store import Shard, StateSequence, open_checked


class SpooledStates:
    """The documents of a spool, read as those of a store are (see data.store.States).

    Document d of epoch e has the index e * N + d, N being the documents of one epoch, so its states lie in a shard
    of its own epoch.
    """

    def __init__(self, spool: Spool, texts: Texts, sequences_per_shard: int, aux_layer_ids: Sequence[int]):
        self.spool = spool
        self.aux_layer_ids = list(aux_layer_ids)
        self.ids = texts.ids
        self._texts = texts
        self._size = sequences_per_shard
        self._open: dict[int, Shard] = {}
        step = max(1, spool.capacity // 2) * sequences_per_shard
        self.groups = [range(start, min(start + step, len(texts))) for start in range(0, len(texts), step)]

    def __len__(self) -> int:
        return len(self._texts)

    def tokens(self, index: int) -> tuple[Tensor, Tensor]:
        """Token ids (T,) int64 and loss mask (T,) bool of a document, from its text."""
        ids, mask = self._texts.tokens(index % len(self))
        return torch.from_numpy(ids), torch.from_numpy(mask)

    def offset(self, epoch: int) -> int:
        """An epoch's documents follow those of the epoch before."""
        return epoch * len(self)

    def shard_of(self, index: int) -> int:
        """The spool index of a document's shard."""
        epoch, document = divmod(index, len(self))
        return epoch * self.spool.num_shards + document // self._size

    def __getitem__(self, index: int) -> StateSequence:
        number = self.shard_of(index)
        if number not in self._open:
            self._open[number] = self._checked(number)
        return self._open[number][index % len(self) % self._size]

    def close_before(self, first_needed: int) -> None:
        """Let go of shards that are no longer needed, so that deleting them frees their space."""
        for number in list(self._open):  # a copy: the thread that reads ahead may be opening one
            if number < first_needed:
                self._open.pop(number)

    def _checked(self, number: int) -> Shard:
        start = number % self.spool.num_shards * self._size
        return open_checked(self.spool.path(number), self._texts.ids[start : start + self._size])
