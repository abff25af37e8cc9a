"""One shard of hidden states: its layout, how it is written and how it is read.

A shard is a safetensors file without padding. All its sequences lie end to end along the token axis, and `offsets`
gives where each begins. What only a loss reads is stored for the rows that can be a teacher (see `first_teacher_row`),
which lie end to end along an axis of their own. Sizes: N aux layers, H hidden, T tokens and R teacher rows in the
shard, S sequences.

    input_ids        int32    (T,)
    loss_mask        uint8    (T,)     1 where the target generated the token, 2 where a prompt's is learned
    offsets          int64    (S + 1,) into T
    teacher_offsets  int64    (S + 1,) into R
    aux.K            bf16     (T, H)   residual stream at boundary K, for every aux layer id K; or, with states.format
                     e4m3     (T, H)   fp8, with aux.K.scale float32 (T,)
    last_hidden      bf16     (R, H)   input of the final norm; omitted when boundary L is itself an aux layer in bf16
    argmax           int32    (R,)     most likely next token over the full vocabulary
    lse              float32  (R,)     log-sum-exp of the target's logits at temperature 1
    sums             int64    (S, C)   checksum of each sequence's part of the C other tensors, by name (see `row_sum`)

The file's metadata is one JSON object: ids (prompt ids of the sequences), aux_layer_ids, num_target_layers,
format, and index_sha256 over everything that the sums do not cover. So every byte of a shard is compared with what was
written when it is read; training need not hash terabytes before its first step.

argmax and lse are what training needs of the full vocabulary; the logits themselves it recomputes for the rows of
the draft vocabulary only. last_hidden is never fp8: on the embedded target an fp8 teacher's argmax differs from the
target's at 0.9 % of all positions, and teacher rows are the small part of a store. A target that computes in float32
stores float32 where the table has bf16.
"""

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafthead.artifacts import ArtifactError, digest
from drafthead.drafters.batch import dequantise
from drafthead.files import atomic_path

Format = Literal["bf16", "fp8"]
FP8 = torch.float8_e4m3fn
TEACHER_ROWS = ("last_hidden", "argmax", "lse")
_INDEX = ("offsets", "teacher_offsets", "sums")
_METADATA = "drafthead"
_HEADER = 1 << 16  # bytes to spare for names, ids and shapes


@dataclass(frozen=True)
class StateSequence:
    """One conversation with the target's states. T tokens, H hidden, R teacher rows, those of its last R tokens.

    Attributes:
        id: the prompt's id.
        input_ids: (T,) int32.
        loss_mask: (T,) uint8, 1 where the target generated the token, 2 where a prompt's is learned.
        aux: aux layer id -> (T, H); as stored, e4m3 with scales.
        last_hidden: (R, H), the input of the target's final norm.
        argmax: (R,) int32, the target's most likely next token.
        lse: (R,) float32, log-sum-exp over the target's full vocabulary.
        scales: aux layer id -> (T,) float32, where `aux` is in e4m3.
    """

    id: str
    input_ids: Tensor
    loss_mask: Tensor
    aux: dict[int, Tensor]
    last_hidden: Tensor
    argmax: Tensor
    lse: Tensor
    scales: dict[int, Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[0]

    @property
    def first_teacher_row(self) -> int:
        """Token index of the first of the R rows."""
        return self.num_tokens - len(self.argmax)

    def dequantised(self) -> "StateSequence":
        """The same with aux layers in bf16 that are stored in e4m3."""
        exact = {layer_id: dequantise(self.aux[layer_id], scale) for layer_id, scale in self.scales.items()}
        return replace(self, aux=self.aux | exact, scales={})


def first_teacher_row(loss_mask: Tensor) -> int:
    """Token index of the first row that can be a teacher: one before the first token that is learned.

    Row t of the target is its distribution of token t + 1, and losses are taken on tokens of the mask only, so this
    holds for every drafter that learns the target's next-token distribution:

        token      0  1  2  3  4  5      P prompt, G generated
                   P  P  P  G  G  G
        teachers         2  3  4  5      row 2 is the teacher of token 3

    A drafter that drafts from root t predicts token t + 2 + k at position k, with row t + 1 + k as its teacher, so its
    first row may lie one before; a drafter of blocks predicts the tokens after an anchor, each with the row before.

    Args:
        loss_mask: (T,) mask of one sequence, nonzero where a token is learned.

    Returns:
        The row's index; T when nothing is learned, as no row is a teacher then.
    """
    learned = loss_mask.nonzero()
    return max(int(learned[0]) - 1, 0) if len(learned) else len(loss_mask)


def shard_path(directory: Path, index: int) -> Path:
    """Path of shard `index` of a store."""
    return directory / f"shard-{index:05d}.safetensors"


# fp8: e4m3 values with a float32 scale per row


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(T, H) of any float type -> (T, H) e4m3 and (T,) float32 scales. A row that is not finite stays so.

    A row is scaled so that its largest entry meets the largest e4m3 number. Three bits of mantissa leave a relative
    error of 2.6 % (root mean square, measured on states of the embedded target).
    """
    wide = rows.float()
    largest = wide.abs().amax(-1)
    scale = torch.where(largest == 0, 1.0, largest / torch.finfo(FP8).max)
    return (wide / scale[:, None]).to(FP8), scale


# Checksums


def row_sum(rows: Tensor) -> int:
    """Sum of the bytes of a tensor as signed 64-bit words, modulo 2^64; bytes beyond the last whole word count too.

    It runs at the speed of memory. A flipped bit, a page of zeros or rows of another sequence change it; given up is
    what a cryptographic hash finds besides, such as words that changed places.
    """
    data = rows.contiguous().reshape(-1).view(torch.uint8).numpy()
    whole = len(data) // 8 * 8
    rest = np.frombuffer(data[whole:].tobytes().ljust(8, b"\0"), np.int64)
    return int((rest + data[:whole].view(np.int64).sum())[0])  # of an array: wraps without a warning


def _index_digest(metadata: dict[str, Any], schema: dict[str, list[Any]], index: dict[str, list[Any]]) -> str:
    """SHA-256 of the metadata, of each tensor's type and shape, and of the offsets and sums themselves."""
    return digest({**metadata, "schema": schema, **index})


# Writing


def write_shard(
    path: Path, sequences: Sequence[StateSequence], num_target_layers: int, number_format: Format = "bf16"
) -> None:
    """Write one shard, whole or not at all.

    Args:
        path: path of the shard, from `shard_path`.
        sequences: sequences of the shard, at least one, all with the same aux layers.
        num_target_layers: L; the aux layer with this id, if any, doubles as last_hidden (not in fp8).
        number_format: number format of the aux layers.

    Raises:
        DiskFullError: the shard does not fit on the disk.
    """
    aux_layer_ids = sorted(sequences[0].aux)
    tensors = {
        "input_ids": torch.cat([s.input_ids for s in sequences]).to(torch.int32),
        "loss_mask": torch.cat([s.loss_mask for s in sequences]).to(torch.uint8),
        "offsets": _offsets([s.num_tokens for s in sequences]),
        "teacher_offsets": _offsets([len(s.argmax) for s in sequences]),
        "argmax": torch.cat([s.argmax for s in sequences]).to(torch.int32),
        "lse": torch.cat([s.lse for s in sequences]).to(torch.float32),
    }
    for layer_id in aux_layer_ids:
        name, rows = f"aux.{layer_id}", [s.aux[layer_id] for s in sequences]
        if number_format == "fp8":
            pairs = [quantise(part) for part in rows]  # one sequence at a time: the float32 copy stays small
            tensors[name] = torch.cat([values for values, _ in pairs])
            tensors[f"{name}.scale"] = torch.cat([scale for _, scale in pairs])
        else:
            tensors[name] = torch.cat(rows).contiguous()
    if num_target_layers not in aux_layer_ids or number_format == "fp8":
        tensors["last_hidden"] = torch.cat([s.last_hidden for s in sequences]).contiguous()
    columns = []
    for name in _summed(tensors):
        ends = tensors["teacher_offsets" if name in TEACHER_ROWS else "offsets"].tolist()
        columns.append([row_sum(tensors[name][start:stop]) for start, stop in pairwise(ends)])
    tensors["sums"] = torch.tensor(columns, dtype=torch.int64).T.contiguous()
    metadata = {
        "ids": [s.id for s in sequences],
        "aux_layer_ids": aux_layer_ids,
        "num_target_layers": num_target_layers,
        "format": number_format,
    }
    schema = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    metadata["index_sha256"] = _index_digest(metadata, schema, {name: tensors[name].tolist() for name in _INDEX})
    with atomic_path(path, needed=sum(tensor.nbytes for tensor in tensors.values()) + _HEADER) as temporary:
        # One key: safetensors writes several in random order, and equal shards should be equal files.
        save_file(tensors, temporary, metadata={_METADATA: json.dumps(metadata)})


def _offsets(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *lengths], dtype=torch.int64).cumsum(0)


def _summed(names: Iterable[str]) -> list[str]:
    """The columns of `sums`."""
    return sorted(set(names) - set(_INDEX))


# Reading


class Sequences(ABC):
    """Sequences by index: as they are stored, or with their states in the type that the target computes in."""

    ids: list[str]

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> StateSequence:
        return self.stored(index).dequantised()

    @abstractmethod
    def stored(self, index: int) -> StateSequence:
        """A sequence as it is stored: half the bytes where that is e4m3."""


class Shard(Sequences):
    """Random access to the sequences of one shard, by memory map.

    Attributes:
        path: path of the file.
        ids: prompt ids of the shard's sequences.
        aux_layer_ids: ids of the stored aux layers, ascending.
        harvest: values that all shards of a store have in common: aux_layer_ids, format, hidden_size.

    Raises:
        ArtifactError: the file is truncated or not a shard, or its index was changed.
        FileNotFoundError: it does not exist.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._file = safe_open(path, framework="pt")
            metadata = json.loads(self._file.metadata()[_METADATA])
            slices = {name: self._file.get_slice(name) for name in sorted(self._file.keys())}
            schema = {name: [str(part[:0].dtype), part.get_shape()] for name, part in slices.items()}
            index = {name: self._file.get_tensor(name).tolist() for name in _INDEX}
            if metadata.pop("index_sha256") != _index_digest(metadata, schema, index):
                raise ArtifactError(
                    f"the index of {path} was changed after it was written; delete it and harvest again"
                )
        except (SafetensorError, OSError, KeyError, TypeError, UnicodeDecodeError, json.JSONDecodeError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise ArtifactError(f"{path} is not a whole shard ({error}); delete it and harvest again") from error
        self.ids = metadata["ids"]
        self.aux_layer_ids: list[int] = metadata["aux_layer_ids"]
        hidden_size = schema[f"aux.{self.aux_layer_ids[0]}"][1][1]
        self.harvest = {name: metadata[name] for name in ("aux_layer_ids", "format")} | {"hidden_size": hidden_size}
        self._last_layer: int = metadata["num_target_layers"]
        self._offsets: list[int] = index["offsets"]
        self._teacher_offsets: list[int] = index["teacher_offsets"]
        self._sums = dict(zip(_summed(slices), zip(*index["sums"], strict=True), strict=True))

    def rows(self, index: int, name: str) -> Tensor:
        """One tensor of one sequence as it is stored, without reading the others.

        Args:
            index: index of the sequence.
            name: name of the tensor; TEACHER_ROWS have R rows, all other tensors T.

        Raises:
            ArtifactError: these bytes are not the ones that were written.
        """
        ends = self._teacher_offsets if name in TEACHER_ROWS else self._offsets
        try:
            values = self._file.get_slice(name)[ends[index] : ends[index + 1]]
        except SafetensorError as error:
            raise ArtifactError(f"{self.path} is damaged ({error}); delete it and harvest again") from error
        if row_sum(values) != self._sums[name][index]:
            raise ArtifactError(
                f"{self.path}: {name} of sequence {self.ids[index]} was changed after it was written; "
                "delete the shard and harvest again, which makes only what is missing"
            )
        return values

    def stored(self, index: int) -> StateSequence:
        parts = {name: self.rows(index, name) for name in self._sums}
        first = len(parts["input_ids"]) - len(parts["argmax"])
        scaled = [layer_id for layer_id in self.aux_layer_ids if f"aux.{layer_id}.scale" in parts]
        return StateSequence(
            id=self.ids[index],
            input_ids=parts["input_ids"],
            loss_mask=parts["loss_mask"],
            aux={layer_id: parts[f"aux.{layer_id}"] for layer_id in self.aux_layer_ids},
            last_hidden=parts["last_hidden"] if "last_hidden" in parts else parts[f"aux.{self._last_layer}"][first:],
            argmax=parts["argmax"],
            lse=parts["lse"],
            scales={layer_id: parts[f"aux.{layer_id}.scale"] for layer_id in scaled},
        )

    def check(self) -> None:
        """Read every row and compare it with its checksum; raises ArtifactError."""
        for index in range(len(self)):
            self.stored(index)


def open_checked(path: Path, ids: Sequence[str]) -> Shard:
    """The shard of these sequences.

    Args:
        path: path of the shard.
        ids: prompt ids that the shard should hold, in order.

    Raises:
        ArtifactError: it is damaged, or holds other sequences.
        FileNotFoundError: it does not exist.
    """
    shard = Shard(path)
    if shard.ids != list(ids):
        raise ArtifactError(f"{path} holds other sequences than the responses; delete it and harvest again")
    return shard
