"""Sequences of random states, small enough to be compared whole."""

import dataclasses
from pathlib import Path

import torch

from drafthead.data.shard import TEACHER_ROWS, StateSequence, first_teacher_row, shard_path, write_shard
from drafthead.data.store import StateStore


def sequence(name: str, length: int, layers=(1, 3), hidden=4) -> StateSequence:
    generator = torch.Generator().manual_seed(length)
    rows = {layer_id: torch.randn(length, hidden, generator=generator).bfloat16() for layer_id in layers}
    return StateSequence(
        id=name, input_ids=torch.arange(length, dtype=torch.int32),
        loss_mask=(torch.arange(length) > 1).to(torch.uint8), aux=rows,
        last_hidden=torch.randn(length, hidden, generator=generator).bfloat16(),
        argmax=torch.arange(length, dtype=torch.int32) + 5, lse=torch.randn(length, generator=generator),
    )  # fmt: skip


def document(name: str, ids: list[int], silent: slice = slice(0, 0)) -> StateSequence:
    """A text for the small draft models; its first two tokens are the prompt, as are silent ones, said by a user."""
    drawn = sequence(name, len(ids), layers=(0, 1, 2), hidden=8)
    drawn.loss_mask[silent] = 0
    return dataclasses.replace(drawn, input_ids=torch.tensor(ids, dtype=torch.int32))


def store_of(directory: Path, *documents: StateSequence, number_format: str = "bf16") -> StateStore:
    """A store of one shard, without a manifest."""
    write_shard(shard_path(directory, 0), documents, 9, number_format)
    return StateStore(directory)


def as_harvested(full: StateSequence, first: int | None = None) -> StateSequence:
    """With teacher rows from the first one on, as a harvest stores them, or from another one on."""
    first = first_teacher_row(full.loss_mask) if first is None else first
    rows = {name: getattr(full, name)[first:] for name in TEACHER_ROWS}
    return dataclasses.replace(full, **rows)


def assert_same(actual: StateSequence, expected: StateSequence):
    assert actual.id == expected.id
    for name in ("input_ids", "loss_mask", *TEACHER_ROWS):
        torch.testing.assert_close(getattr(actual, name), getattr(expected, name), rtol=0, atol=0)
    assert actual.aux.keys() == expected.aux.keys()
    for layer_id, rows in expected.aux.items():
        torch.testing.assert_close(actual.aux[layer_id], rows, rtol=0, atol=0)
