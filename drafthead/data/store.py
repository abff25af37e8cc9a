"""The store of hidden states: what the target thought at every position of its own text.

A store is a directory of safetensors shards without padding. All sequences of a shard lie end to end
along the token axis, and `offsets` says where each begins; reading maps the file and copies only the
sequence asked for. Sizes: N taps, H hidden, T tokens in the shard, S sequences.

    input_ids    int32    (T,)
    loss_mask    uint8    (T,)     1 where the target generated the token
    offsets      int64    (S + 1,)
    aux.K        bf16     (T, H)   residual stream at boundary K, for every tap id K
    last_hidden  bf16     (T, H)   input of the final norm; left out when boundary L is itself a tap
    argmax       int32    (T,)     most likely next token over the full vocabulary
    lse          float32  (T,)     log-sum-exp of the target's logits at temperature 1

argmax and lse are what training needs of the full vocabulary; the logits themselves it recomputes for
the rows of the draft vocabulary only. One file per request, the usual alternative, costs an open, a
header and a rename for every few kilobytes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafthead.provenance import ArtefactError, atomic_path

KIND = "states"
_LAST = "last_hidden"
_ABOUT = "drafthead"


@dataclass(frozen=True)
class StateSequence:
    """One conversation with the target's states. T tokens, H hidden.

    Attributes:
        id: the prompt's id.
        input_ids: (T,) int32.
        loss_mask: (T,) uint8, 1 where the target generated the token.
        aux: tap id -> (T, H).
        last_hidden: (T, H), the input of the target's final norm.
        argmax: (T,) int32, the target's most likely next token.
        lse: (T,) float32, log-sum-exp over the target's full vocabulary.
    """

    id: str
    input_ids: Tensor
    loss_mask: Tensor
    aux: dict[int, Tensor]
    last_hidden: Tensor
    argmax: Tensor
    lse: Tensor

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]


def shard_path(directory: Path, index: int) -> Path:
    """Where shard `index` of a store lies."""
    return directory / f"shard-{index:05d}.safetensors"


def write_shard(path: Path, sequences: Sequence[StateSequence], num_target_layers: int) -> None:
    """Write one shard, whole or not at all.

    Args:
        path: from `shard_path`.
        sequences: at least one, all with the same taps.
        num_target_layers: L; the tap with this id, if any, doubles as last_hidden.

    Raises:
        ValueError: there is nothing to write, or a sequence's tensors disagree in length.
    """
    if not sequences:
        raise ValueError(f"no sequences to write into {path}")
    for sequence in sequences:
        _check_lengths(sequence)
    lengths = torch.tensor([0, *(s.num_tokens for s in sequences)], dtype=torch.int64)
    tensors = {
        "input_ids": torch.cat([s.input_ids for s in sequences]).to(torch.int32),
        "loss_mask": torch.cat([s.loss_mask for s in sequences]).to(torch.uint8),
        "offsets": lengths.cumsum(0),
        "argmax": torch.cat([s.argmax for s in sequences]).to(torch.int32),
        "lse": torch.cat([s.lse for s in sequences]).to(torch.float32),
    }
    tap_ids = sorted(sequences[0].aux)
    for tap in tap_ids:
        tensors[f"aux.{tap}"] = torch.cat([s.aux[tap] for s in sequences]).contiguous()
    if num_target_layers not in tap_ids:
        tensors[_LAST] = torch.cat([s.last_hidden for s in sequences]).contiguous()
    # One key: safetensors writes several in random order, and equal shards should be equal files.
    about = {"ids": [s.id for s in sequences], "tap_ids": tap_ids, "num_target_layers": num_target_layers}
    with atomic_path(path) as temporary:
        save_file(tensors, temporary, metadata={_ABOUT: json.dumps(about)})


class Shard:
    """Random access to the sequences of one shard, by memory map.

    Raises:
        ArtefactError: the file is truncated or not a shard.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = safe_open(path, framework="pt")
            about = json.loads(self._file.metadata()[_ABOUT])
            self.ids: list[str] = about["ids"]
            self.tap_ids: list[int] = about["tap_ids"]
            self._last = f"aux.{about['num_target_layers']}"
            self._offsets: list[int] = self._file.get_tensor("offsets").tolist()
        except (SafetensorError, KeyError, TypeError) as error:
            raise ArtefactError(f"{path} is not a whole shard ({error}); delete it and harvest again") from error
        if _LAST in self._file.keys():  # noqa: SIM118 - safe_open is not a mapping
            self._last = _LAST

    def __len__(self) -> int:
        return len(self.ids)

    def rows(self, index: int, name: str) -> Tensor:
        """One tensor of one sequence, without reading the others."""
        return self._file.get_slice(name)[self._offsets[index] : self._offsets[index + 1]]

    def __getitem__(self, index: int) -> StateSequence:
        def rows(name: str) -> Tensor:
            return self.rows(index, name)

        return StateSequence(
            id=self.ids[index],
            input_ids=rows("input_ids"),
            loss_mask=rows("loss_mask"),
            aux={tap: rows(f"aux.{tap}") for tap in self.tap_ids},
            last_hidden=rows(self._last),
            argmax=rows("argmax"),
            lse=rows("lse"),
        )


def open_checked(path: Path, ids: Sequence[str]) -> Shard:
    """A shard that holds what it should.

    Raises:
        ArtefactError: it is damaged, or holds other sequences.
        FileNotFoundError: it does not exist.
    """
    shard = Shard(path)
    if shard.ids != list(ids):
        raise ArtefactError(f"{path} holds other sequences than the responses say; delete it and harvest again")
    return shard


class States(Protocol):
    """What training reads: documents with their states. Texts are known from the start, states may come later.

    Attributes:
        tap_ids: taps of every document, ascending.
        groups: which documents may be shuffled together, as ranges that cover all of them in order.
    """

    tap_ids: list[int]
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
        ArtefactError: the directory has no shard, or one is damaged.
    """

    def __init__(self, directory: Path):
        paths = sorted(directory.glob("shard-*.safetensors"))
        if not paths:
            raise ArtefactError(f"{directory} has no shards; run: python data_gen/harvest.py RECIPE")
        self._shards = [Shard(path) for path in paths]
        self._index = [(shard, i) for shard in self._shards for i in range(len(shard))]
        self.tap_ids = self._shards[0].tap_ids
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


def _check_lengths(sequence: StateSequence) -> None:
    expected = sequence.num_tokens
    named = {
        "loss_mask": sequence.loss_mask,
        "argmax": sequence.argmax,
        "lse": sequence.lse,
        "last_hidden": sequence.last_hidden,
        **{f"aux.{tap}": rows for tap, rows in sequence.aux.items()},
    }
    for name, tensor in named.items():
        if tensor.shape[0] != expected:
            raise ValueError(
                f"sequence {sequence.id}: {name} has {tensor.shape[0]} rows but input_ids has {expected}; "
                "the harvest stored states for another text"
            )
