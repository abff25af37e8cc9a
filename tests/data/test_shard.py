"""Shards: what is written is read, fp8 and teacher rows change nothing else, and every changed byte is found."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from drafthead.artifacts import ArtifactError
from drafthead.data.shard import (
    FP8,
    Shard,
    StateSequence,
    first_teacher_row,
    quantise,
    shard_path,
    write_shard,
)  # fmt: skip
from drafthead.drafters.batch import dequantise
from drafthead.files import DiskFullError
from tests.data.sequences import as_harvested, assert_same, sequence


def long_prompts(*lengths: int) -> list[StateSequence]:
    """Documents whose second half was generated."""
    documents = [sequence(f"d{n}", n) for n in lengths]
    for document in documents:
        document.loss_mask[: document.num_tokens // 2] = 0
    return documents


def written(path: Path, *sequences: StateSequence, layers: int = 5, number_format="bf16") -> Shard:
    write_shard(path, sequences, layers, number_format)
    return Shard(path)


@pytest.mark.parametrize(
    ("mask", "first"), [([0, 0, 0, 1, 1], 2), ([0, 1, 0, 1], 0), ([1, 1], 0), ([0, 0], 2), ([0, 0, 1, 0, 1], 1)]
)
def test_teachers_begin_with_the_row_that_predicts_the_first_generated_token(mask, first):
    assert first_teacher_row(torch.tensor(mask)) == first


def test_quantising_keeps_three_bits_and_the_scale_of_every_token():
    rows = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = rows * torch.logspace(-20, 20, 50)[:, None].bfloat16()  # from almost nothing to almost overflow
    rows[7] = 0
    values, scale = quantise(rows)
    assert (values.dtype, scale.dtype, tuple(scale.shape)) == (FP8, torch.float32, (50,))
    restored = dequantise(values, scale)
    assert restored.dtype == torch.bfloat16
    largest = rows.float().abs().amax(-1, keepdim=True)
    error = (restored.float() - rows.float()).abs()
    # Half a step of three mantissa bits, plus bf16's half step; entries below 2^-6 of 448 ths are subnormal.
    assert (error <= rows.float().abs() * (2**-4 + 2**-8) + largest * 2**-9 / 448).all()
    assert (restored[7] == 0).all()


def test_fp8_halves_the_aux_layers_and_leaves_the_teacher_rows(tmp_path):
    expected = [as_harvested(d) for d in long_prompts(30, 8)]
    path = shard_path(tmp_path, 0)
    shard = written(path, *expected, layers=3, number_format="fp8")  # aux layer 3 is the last boundary
    stored = load_file(path)
    assert stored["aux.1"].dtype == FP8
    assert stored["aux.1.scale"].shape == (38,)
    assert stored["last_hidden"].shape == (16 + 5, 4)
    for i, original in enumerate(expected):
        rounded = {layer_id: dequantise(*quantise(rows)) for layer_id, rows in original.aux.items()}
        assert_same(shard[i], dataclasses.replace(original, aux=rounded))


def test_sequences_come_back_with_their_teacher_rows(tmp_path):
    nothing_generated = sequence("prompt", 5)
    nothing_generated.loss_mask[:] = 0
    expected = [as_harvested(d) for d in (*long_prompts(9, 4, 20), nothing_generated)] + [sequence("all rows", 3)]
    shard = written(shard_path(tmp_path, 0), *expected)
    for i, original in enumerate(expected):
        assert_same(shard[i], original)


def test_the_last_boundary_is_stored_once_when_it_is_an_aux_layer(tmp_path):
    one = as_harvested(sequence("a", 4, layers=(1, 5)))
    shard = written(tmp_path / "s.safetensors", one)
    assert "last_hidden" not in load_file(shard.path)
    torch.testing.assert_close(shard[0].last_hidden, one.aux[5][1:], rtol=0, atol=0)


def test_every_changed_byte_is_found(tmp_path):
    path = shard_path(tmp_path, 0)
    parts = [as_harvested(sequence("a", 5)), as_harvested(sequence("b", 3))]
    written(path, *parts, number_format="fp8").check()
    content = path.read_bytes()
    for place in range(len(content)):
        changed = bytearray(content)
        changed[place] ^= 0x10
        path.write_bytes(changed)
        with pytest.raises(ArtifactError, match="shard-00000"):
            Shard(path).check()


def test_a_shard_that_will_not_fit_is_not_begun(tmp_path, monkeypatch):
    write_shard(shard_path(tmp_path, 0), [sequence("a", 9)], num_target_layers=5)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3))
    with pytest.raises(DiskFullError, match=r"shard-00001\S+ .*\b3\b"):
        write_shard(shard_path(tmp_path, 1), [sequence("b", 9)], num_target_layers=5)
    assert list(tmp_path.iterdir()) == [shard_path(tmp_path, 0)]
