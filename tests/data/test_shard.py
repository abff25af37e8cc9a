"""fp8 and the loss rows of a shard: what is saved on disk, and that nothing else changes."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafthead.drafters.batch import first_loss_row
from drafthead.data.fp8 import FP8, dequantise, quantise
from drafthead.data.packing import PackedBatch, pack
from drafthead.data.store import Shard, StateSequence, StateStore, shard_path, write_shard
from drafthead.data.packing import cut
from drafthead.provenance import ArtefactError
from tests.data.sequences import assert_same, sequence


def tail_only(full: StateSequence) -> StateSequence:
    """As a harvest stores it: what only the loss reads from the first row that can carry loss."""
    first = first_loss_row(full.loss_mask)
    tail = {name: getattr(full, name)[first:] for name in ("last_hidden", "argmax", "lse")}
    return dataclasses.replace(full, **tail, first_row=first)


def long_prompts(*lengths: int) -> list[StateSequence]:
    """Documents whose second half was generated."""
    documents = [sequence(f"d{n}", n) for n in lengths]
    for document in documents:
        document.loss_mask[: document.num_tokens // 2] = 0
    return documents


def test_quantising_keeps_three_bits_and_the_scale_of_every_token():
    rows = torch.randn(50, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    rows = rows * torch.logspace(-20, 20, 50)[:, None].bfloat16()  # from almost nothing to almost overflow
    rows[7] = 0
    values, scale = quantise(rows)
    assert (values.dtype, scale.dtype, tuple(scale.shape)) == (FP8, torch.float32, (50,))
    found = dequantise(values, scale)
    assert found.dtype == torch.bfloat16
    largest = rows.float().abs().amax(-1, keepdim=True)
    error = (found.float() - rows.float()).abs()
    # Half a step of three mantissa bits, plus bf16's half step; entries below 2^-6 of 448 ths are subnormal.
    assert (error <= rows.float().abs() * (2**-4 + 2**-8) + largest * 2**-9 / 448).all()
    assert (found[7] == 0).all()


def test_a_row_that_is_not_finite_stays_so():
    for bad in (float("nan"), float("inf")):
        rows = torch.ones(2, 4)
        rows[0, 2] = bad
        found = dequantise(*quantise(rows))
        assert not found[0].isfinite().all()
        assert (found[1] == 1).all()


def test_fp8_halves_the_taps_and_leaves_what_the_teacher_reads(tmp_path):
    wanted = [tail_only(d) for d in long_prompts(30, 8)]
    write_shard(shard_path(tmp_path, 0), wanted, num_target_layers=3, number_format="fp8")  # aux layer 3 is the last boundary
    stored = load_file(shard_path(tmp_path, 0))
    assert stored["aux.1"].dtype == FP8
    assert stored["aux.1.scale"].shape == (38,)
    assert stored["last_hidden"].shape == (17 + 6, 4)
    for found, given in zip(map(StateStore(tmp_path).__getitem__, range(2)), wanted, strict=True):
        rounded = {layer_id: dequantise(*quantise(rows)) for layer_id, rows in given.aux.items()}
        assert_same(found, dataclasses.replace(given, aux=rounded))
        assert found.first_row == given.first_row


def test_only_the_loss_rows_come_back(tmp_path):
    wanted = [tail_only(d) for d in long_prompts(9, 4, 20)]
    silent = sequence("silent", 5)
    silent = dataclasses.replace(
        silent, last_hidden=silent.last_hidden[:0], argmax=silent.argmax[:0], lse=silent.lse[:0], first_row=5
    )
    write_shard(shard_path(tmp_path, 0), [*wanted, silent], num_target_layers=9)
    shard = Shard(shard_path(tmp_path, 0))
    for i, given in enumerate([*wanted, silent]):
        assert_same(shard[i], given)
        assert (shard[i].first_row, shard.first_row(i)) == (given.first_row, given.first_row)


@pytest.mark.parametrize("last", [3, 9])  # boundary 3 is an aux layer, 9 is not
def test_batches_are_the_same_to_the_last_bit(tmp_path, last):
    documents = long_prompts(9, 40, 21)
    if last == 3:
        documents = [dataclasses.replace(d, last_hidden=d.aux[3]) for d in documents]
    batches = []
    for name, kept in (("full", documents), ("tail", [tail_only(d) for d in documents])):
        write_shard(shard_path(tmp_path / name, 0), kept, num_target_layers=last)
        store = StateStore(tmp_path / name)
        windows = [w for i, d in enumerate(documents) for w in cut(i, d.loss_mask, budget=12, num_steps=2)]
        batches.append(pack(store, windows))
    for field in dataclasses.fields(PackedBatch):
        full, tail = (getattr(batch, field.name) for batch in batches)
        if isinstance(full, torch.Tensor):
            assert torch.equal(full, tail), field.name
    sizes = [sum(p.stat().st_size for p in (tmp_path / name).iterdir()) for name in ("full", "tail")]
    assert sizes[1] < sizes[0]


def test_a_tail_of_another_length_is_refused(tmp_path):
    broken = dataclasses.replace(tail_only(sequence("bad", 9)), first_row=3)
    with pytest.raises(ValueError, match=r"sequence bad: last_hidden has 9 rows but its tail has 6 of 9"):
        write_shard(shard_path(tmp_path, 0), [broken], num_target_layers=9)


def test_a_shard_of_the_first_layout_is_refused(tmp_path):
    path = shard_path(tmp_path, 0)
    write_shard(path, [sequence("a", 4)], num_target_layers=9)
    old = {"ids": ["a"], "aux_layer_ids": [1, 3], "num_target_layers": 9}
    save_file(load_file(path), path, metadata={"drafthead": json.dumps(old)})
    with pytest.raises(ArtefactError, match=r"has layout 1, this version reads layout 3; delete .* and harvest again"):
        StateStore(tmp_path)
