"""One shard of hidden states: what it holds, how it is written, how it is read.

A shard is a safetensors file without padding. All its sequences lie end to end along the token axis, and `offsets`
says where each begins. What only the loss reads (see drafters.layout) is kept for the tail of each sequence that can
carry loss: its rows lie end to end along an axis of their own, with offsets of their own. Sizes: N aux layers, H hidden,
T tokens and R tail rows in the shard, S sequences.

    input_ids      int32    (T,)
    loss_mask      uint8    (T,)     1 where the target generated the token
    offsets        int64    (S + 1,) into T
    tail_offsets   int64    (S + 1,) into R
    aux.K          bf16     (T, H)   residual stream at boundary K, for every aux layer id K; or, with states.format fp8,
                   e4m3     (T, H)   with aux.K.scale float32 (T,)
    last_hidden    bf16     (R, H)   input of the final norm; left out when boundary L is itself an aux layer and not in fp8
    argmax         int32    (R,)     most likely next token over the full vocabulary
    lse            float32  (R,)     log-sum-exp of the target's logits at temperature 1
    sums           int64    (S, C)   of each sequence's part of the C other tensors, compared at every read
                                     (data.row_sums); the file's metadata has their names in order

argmax and lse are what training needs of the full vocabulary; the logits themselves it recomputes for the rows of
the draft vocabulary only. last_hidden is never fp8: on the embedded target an fp8 teacher's argmax differs from the
target's at 0.9 % of all positions, and the tail is the small part of a store. A target that computes in float32
stores float32 where it says bf16.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafthead.data import checksums
from drafthead.data.fp8 import dequantise, quantise
from drafthead.data.row_sums import row_sum, sums_of
from drafthead.files import atomic_path, remove_leftovers
from drafthead.provenance import ArtefactError
from drafthead.files import check_space

LAYOUT = 3  # of the tensors above; 1 had last_hidden, argmax and lse for every token, 2 no sums
Format = Literal["bf16", "fp8"]
LAST = "last_hidden"
TAIL = (LAST, "argmax", "lse")
SUMS = "sums"
_OFFSETS = ("offsets", "tail_offsets")
_ABOUT = "drafthead"
_HEADER = 1 << 16  # bytes to spare for names, ids and shapes


@dataclass(frozen=True)
class StateSequence:
    """One conversation with the target's states. T tokens, H hidden, R = T - first_row tail rows.

    Attributes:
        id: the prompt's id.
        input_ids: (T,) int32.
        loss_mask: (T,) uint8, 1 where the target generated the token.
        aux: aux layer id -> (T, H).
        last_hidden: (R, H), the input of the target's final norm.
        argmax: (R,) int32, the target's most likely next token.
        lse: (R,) float32, log-sum-exp over the target's full vocabulary.
        first_row: token index of the first tail row; at most the first row that can carry loss.
    """

    id: str
    input_ids: Tensor
    loss_mask: Tensor
    aux: dict[int, Tensor]
    last_hidden: Tensor
    argmax: Tensor
    lse: Tensor
    first_row: int = 0

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]


def shard_path(directory: Path, index: int) -> Path:
    """Where shard `index` of a store lies."""
    return directory / f"shard-{index:05d}.safetensors"


def write_shard(
    path: Path, sequences: Sequence[StateSequence], num_target_layers: int, number_format: Format = "bf16"
) -> None:
    """Write one shard, whole or not at all, with a note of its checksum.

    Args:
        path: from `shard_path`.
        sequences: at least one, all with the same aux layers.
        num_target_layers: L; the aux layer with this id, if any, doubles as last_hidden (not in fp8).
        number_format: of the aux layers.

    Raises:
        DiskFullError: the shard does not fit on the disk.
        ValueError: there is nothing to write, or a sequence's tensors disagree in length.
    """
    if not sequences:
        raise ValueError(f"no sequences to write into {path}")
    for sequence in sequences:
        _check_lengths(sequence)
    aux_layer_ids = sorted(sequences[0].aux)
    tensors = _shared_tensors(sequences)
    for layer_id in aux_layer_ids:
        tensors |= _layer_tensors(f"aux.{layer_id}", [s.aux[layer_id] for s in sequences], number_format)
    if num_target_layers not in aux_layer_ids or number_format == "fp8":
        tensors[LAST] = torch.cat([s.last_hidden for s in sequences]).contiguous()
    summed = bounds(tensors)
    tensors[SUMS] = sums_of(tensors, summed)
    about = {
        "layout": LAYOUT,
        "summed": list(summed),
        "ids": [s.id for s in sequences],
        "aux_layer_ids": aux_layer_ids,
        "num_target_layers": num_target_layers,
        "format": number_format,
    }
    needed = sum(tensor.nbytes for tensor in tensors.values()) + _HEADER
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path)  # before the room is counted
    check_space(path, needed)
    with atomic_path(path) as temporary:
        # One key: safetensors writes several in random order, and equal shards should be equal files.
        save_file(tensors, temporary, metadata={_ABOUT: json.dumps(about)})
        checksums.note(path, temporary)


def bounds(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Where the sequences of a shard begin and end in each of its tensors, by the tensor's name."""
    whole, tail = (tensors[name].tolist() for name in _OFFSETS)
    return {name: tail if name in TAIL else whole for name in sorted(tensors) if name not in (*_OFFSETS, SUMS)}


def _shared_tensors(sequences: Sequence[StateSequence]) -> dict[str, Tensor]:
    def offsets(lengths: list[int]) -> Tensor:
        return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)

    return {
        "input_ids": torch.cat([s.input_ids for s in sequences]).to(torch.int32),
        "loss_mask": torch.cat([s.loss_mask for s in sequences]).to(torch.uint8),
        "offsets": offsets([s.num_tokens for s in sequences]),
        "tail_offsets": offsets([s.num_tokens - s.first_row for s in sequences]),
        "argmax": torch.cat([s.argmax for s in sequences]).to(torch.int32),
        "lse": torch.cat([s.lse for s in sequences]).to(torch.float32),
    }


def _layer_tensors(name: str, rows: list[Tensor], number_format: Format) -> dict[str, Tensor]:
    if number_format == "bf16":
        return {name: torch.cat(rows).contiguous()}
    pairs = [quantise(part) for part in rows]  # one sequence at a time: the float32 copy stays small
    return {name: torch.cat([v for v, _ in pairs]), f"{name}.scale": torch.cat([s for _, s in pairs])}


class Shard:
    """Random access to the sequences of one shard, by memory map.

    Attributes:
        path: of the file.
        ids: prompt ids of its sequences.
        aux_layer_ids: ascending.
        number_format: of the aux layers.
        names: of the file's tensors.

    Raises:
        ArtefactError: the file is truncated or not a shard, or has another layout.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = safe_open(path, framework="pt")
            about = json.loads(self._file.metadata()[_ABOUT])
            layout = about.get("layout", 1)
            if layout != LAYOUT:
                raise ArtefactError(
                    f"{path} has layout {layout}, this version reads layout {LAYOUT}; "
                    f"delete {path.parent} and harvest again"
                )
            self.ids: list[str] = about["ids"]
            self.aux_layer_ids: list[int] = about["aux_layer_ids"]
            self.number_format: Format = about["format"]
            self._offsets: list[int] = self._file.get_tensor("offsets").tolist()
            self._tail_offsets: list[int] = self._file.get_tensor("tail_offsets").tolist()
            self._sums: dict[str, list[int]] = dict(
                zip(about["summed"], self._file.get_tensor(SUMS).T.tolist(), strict=True)
            )
        except (SafetensorError, OSError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise ArtefactError(f"{path} is not a whole shard ({error}); delete it and harvest again") from error
        self.names = set(self._file.keys())
        self._last_layer = f"aux.{about['num_target_layers']}"

    def __len__(self) -> int:
        return len(self.ids)

    def tensor(self, name: str) -> Tensor:
        """A whole tensor, as stored."""
        return self._file.get_tensor(name)

    def shape(self, name: str) -> list[int]:
        """Shape of a tensor, from the header."""
        return self._file.get_slice(name).get_shape()

    def rows(self, index: int, name: str) -> Tensor:
        """One tensor of one sequence, without reading the others; fp8 becomes bf16 here and nowhere else.

        Args:
            index: of the sequence.
            name: of the tensor; those of the tail have R rows, the others T.

        Raises:
            ArtefactError: these bytes are not the ones that were written.
        """
        values, scale = self._checked(index, name), f"{name}.scale"
        return dequantise(values, self._checked(index, scale)) if scale in self.names else values

    def _checked(self, index: int, name: str) -> Tensor:
        ends = self._tail_offsets if name in TAIL else self._offsets
        try:
            values = self._file.get_slice(name)[ends[index] : ends[index + 1]]
            same = row_sum(values) == self._sums[name][index]
        except (SafetensorError, IndexError, KeyError) as error:
            raise ArtefactError(f"{self.path} is damaged ({error}); delete it and harvest again") from error
        if not same:
            raise ArtefactError(
                f"{self.path}: {name} of sequence {self.ids[index]} is not what was written: its bytes were changed; "
                "delete the shard and harvest again, which makes only what is missing"
            )
        return values

    def first_row(self, index: int) -> int:
        """Token index of a sequence's first tail row."""
        tokens = self._offsets[index + 1] - self._offsets[index]
        return tokens - (self._tail_offsets[index + 1] - self._tail_offsets[index])

    def __getitem__(self, index: int) -> StateSequence:
        aux = {layer_id: self.rows(index, f"aux.{layer_id}") for layer_id in self.aux_layer_ids}
        first = self.first_row(index)
        return StateSequence(
            id=self.ids[index],
            input_ids=self.rows(index, "input_ids"),
            loss_mask=self.rows(index, "loss_mask"),
            aux=aux,
            last_hidden=self.rows(index, LAST) if LAST in self.names else self.rows(index, self._last_layer)[first:],
            argmax=self.rows(index, "argmax"),
            lse=self.rows(index, "lse"),
            first_row=first,
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


def _check_lengths(sequence: StateSequence) -> None:
    tokens, tail = sequence.num_tokens, sequence.num_tokens - sequence.first_row
    named = {
        "loss_mask": (sequence.loss_mask, tokens),
        **{f"aux.{layer_id}": (rows, tokens) for layer_id, rows in sequence.aux.items()},
        **{name: (getattr(sequence, name), tail) for name in TAIL},
    }
    for name, (tensor, expected) in named.items():
        if tensor.shape[0] != expected:
            counted = f"input_ids has {tokens}" if expected == tokens else f"its tail has {expected} of {tokens}"
            raise ValueError(
                f"sequence {sequence.id}: {name} has {tensor.shape[0]} rows but {counted}; "
                "the harvest stored states for another text"
            )
