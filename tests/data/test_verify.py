"""Verification names what is broken: a flipped bit by checksum, what was wrong from the start by structure or value."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from drafthead import provenance
from drafthead.config import REPO_ROOT
from drafthead.data import shard as shards
from drafthead.data.row_sums import sums_of
from drafthead.files import DiskFullError
from drafthead.data.store import KIND, shard_path, write_shard
from drafthead.data.verify import verify_shard, verify_store
from tests.damage import cut_short, flip_bit, replace_tensors
from tests.data.sequences import sequence


@pytest.fixture
def store(tmp_path) -> Path:
    """Two shards with a manifest."""
    directory = tmp_path / "states"
    provenance.begin(directory, KIND, {"aux_layer_ids": [1, 3], "format": "bf16", "hidden_size": 4})
    write_shard(shard_path(directory, 0), [sequence("a", 9), sequence("b", 4)], num_target_layers=5)
    write_shard(shard_path(directory, 1), [sequence("c", 6)], num_target_layers=5)
    provenance.finish(directory, {"sequences": 3})
    return directory


def rewrite(directory: Path, index: int, **changes: torch.Tensor) -> None:
    """Change tensors of a shard and make the checksums fit again."""
    path = shard_path(directory, index)
    if not {"offsets", "tail_offsets", "extra"} & changes.keys():
        tensors = {**load_file(path), **changes}
        changes["sums"] = sums_of(tensors, shards.bounds(tensors))
    replace_tensors(path, changes)
    provenance.finish(directory, {})


def test_a_whole_store_has_no_problems(store):
    assert verify_store(store) == []


def test_a_flipped_bit_a_lost_and_a_stray_shard_are_named(store):
    path = shard_path(store, 0)
    flip_bit(path)
    shard_path(store, 1).rename(shard_path(store, 2))
    first, second, third, fourth = verify_store(store)
    assert first.startswith("shard-00000.safetensors has another SHA-256")
    assert second == "shard-00001.safetensors is missing"
    assert third == "shard-00002.safetensors is not in manifest.json"
    assert re.search(r"shard-00000\S+: \S+ of sequence [ab] is not what was written", fourth)


def test_a_truncated_shard_is_named_once_by_size_and_once_as_unreadable(store):
    path = shard_path(store, 1)
    cut_short(path)
    size, unreadable = verify_store(store)
    assert "shard-00001.safetensors has" in size
    assert "is not a whole shard" in unreadable


@pytest.mark.parametrize("name", ["aux.1", "aux.3", "last_hidden", "lse"])
def test_values_that_are_not_finite_are_named_with_their_sequence(store, name):
    values = load_file(shard_path(store, 0))[name]
    values[10] = float("nan")  # the second sequence's second row
    rewrite(store, 0, **{name: values})
    assert verify_store(store) == [f"shard-00000.safetensors: {name} of sequence b is not finite at row 1"]


def test_fp8_that_is_not_finite_is_named(tmp_path):
    bad = sequence("x", 5)
    bad.aux[3][2, 1] = float("inf")
    write_shard(shard_path(tmp_path, 0), [bad], num_target_layers=5, number_format="fp8")
    identity = {"aux_layer_ids": [1, 3], "format": "fp8", "hidden_size": 4}
    (problem,) = verify_shard(shard_path(tmp_path, 0), identity)
    assert problem == "shard-00000.safetensors: aux.3 of sequence x is not finite at row 2"


def test_wrong_structure_is_named(store):
    path = shard_path(store, 0)
    tensors, before = load_file(path), path.read_bytes()
    for changes, problem in (
        ({"offsets": torch.tensor([0, 9, 12])}, r"offsets do not lead from 0 to 13 in 2 ascending steps"),
        ({"tail_offsets": torch.tensor([0, 14, 13])}, r"tail_offsets do not lead from 0 to 13"),
        ({"aux.3": tensors["aux.3"][:, :3].contiguous()}, r"aux.3 has shape \[13, 3\], wanted \[13, 4\]"),
        ({"lse": tensors["lse"][:5]}, r"lse has shape \[5\], wanted \[13\]"),
        ({"extra": torch.zeros(1)}, r"it holds .*extra"),
    ):
        rewrite(store, 0, **changes)
        (found,) = verify_store(store)
        assert re.search(problem, found), found
        path.write_bytes(before)
        provenance.finish(store, {})
    assert verify_store(store) == []


def test_missing_loss_rows_and_wrong_identities_are_named(store):
    full = shards.Shard(shard_path(store, 1))[0]
    tail = {name: getattr(full, name)[3:] for name in shards.TAIL}
    write_shard(shard_path(store, 1), [dataclasses.replace(full, **tail, first_row=3)], num_target_layers=5)
    provenance.finish(store, {})
    assert verify_store(store) == [
        "shard-00001.safetensors: sequence c lacks loss rows: they are stored from token 3 on"
    ]
    identity = json.loads((store / "identity.json").read_text()) | {"aux_layer_ids": [1, 2]}
    (store / "identity.json").write_text(json.dumps(identity))
    assert verify_store(store)[0] == "identity.json differs from manifest.json"


def test_a_store_without_a_manifest_is_not_called_whole(store):
    (store / "manifest.json").unlink()
    assert "half finished" in verify_store(store)[0]
    assert "does not exist" in verify_store(store / "none")[0]
    (store / "manifest.json").write_text("{")
    assert "cannot be read" in verify_store(store)[0]


