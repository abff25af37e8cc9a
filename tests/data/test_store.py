"""The store: sequences of all shards in order; verification names what is broken."""

import json
import re
from pathlib import Path

import pytest

from drafthead import artifacts
from drafthead.artifacts import ArtifactError
from drafthead.data.shard import shard_path, write_shard
from drafthead.data.store import KIND, StateStore, verify_shard, verify_store
from tests.damage import flip_bit
from tests.data.sequences import as_harvested, assert_same, sequence


@pytest.fixture
def store(tmp_path) -> Path:
    """Two shards with a manifest."""
    directory = tmp_path / "states"
    artifacts.begin(directory, KIND, {"aux_layer_ids": [1, 3], "format": "bf16", "hidden_size": 4})
    write_shard(shard_path(directory, 0), [sequence("a", 9), sequence("b", 4)], num_target_layers=5)
    write_shard(shard_path(directory, 1), [sequence("c", 6)], num_target_layers=5)
    artifacts.finish(directory, {"sequences": 3})
    return directory


def test_sequences_come_back_in_order_over_shards(tmp_path):
    sequences = [sequence("a", 3), sequence("b", 7), sequence("c", 1), sequence("d", 2)]
    write_shard(shard_path(tmp_path, 0), sequences[:3], num_target_layers=5)
    write_shard(shard_path(tmp_path, 1), sequences[3:], num_target_layers=5)
    store = StateStore(tmp_path)
    assert (len(store), store.ids, store.aux_layer_ids) == (4, list("abcd"), [1, 3])
    for i, expected in enumerate(sequences):
        assert_same(store[i], expected)
    tokens, mask = store.tokens(1)
    assert tokens.tolist() == list(range(7))
    assert mask.tolist() == [False, False, True, True, True, True, True]


def test_an_empty_store_and_shards_of_two_harvests_are_refused(tmp_path):
    with pytest.raises(ArtifactError, match=r"harvest.py"):
        StateStore(tmp_path)
    for index, number_format in enumerate(("bf16", "fp8")):
        write_shard(shard_path(tmp_path, index), [sequence("a", 3)], 5, number_format)
    with pytest.raises(ArtifactError, match=r"shard-00001.*bf16.*fp8"):
        StateStore(tmp_path)


def test_a_flipped_bit_a_lost_and_a_stray_shard_are_named(store):
    flip_bit(shard_path(store, 0))
    shard_path(store, 1).rename(shard_path(store, 2))
    problems = verify_store(store)
    patterns = ("shard-00000", "shard-00001", "shard-00002", r"00000\S+: \w+ of .* b ")
    assert len(problems) == 4
    for problem, named in zip(problems, patterns, strict=True):
        assert re.search(named, problem)


def test_a_byte_that_changed_before_the_store_was_published_is_named(store):
    flip_bit(shard_path(store, 1))
    artifacts.finish(store, {})  # the manifest has the changed file's SHA-256
    (problem,) = verify_store(store)
    assert re.search(r"shard-00001\S+: loss_mask of sequence c", problem)


@pytest.mark.parametrize("number_format", ["bf16", "fp8"])
@pytest.mark.parametrize("name", ["aux.3", "last_hidden", "lse"])
def test_values_that_are_not_finite_are_named_with_their_sequence(tmp_path, name, number_format):
    bad = sequence("b", 5)
    (bad.aux[3] if name == "aux.3" else getattr(bad, name))[1] = float("nan")
    write_shard(shard_path(tmp_path, 0), [sequence("a", 9), bad], 5, number_format)
    (problem,) = verify_shard(shard_path(tmp_path, 0), {})
    assert re.match(rf"shard-00000\S+: {name} of sequence b", problem)


@pytest.mark.parametrize(("name", "value"), [("aux_layer_ids", [1, 2]), ("format", "fp8"), ("hidden_size", 8)])
def test_a_shard_of_another_harvest_is_named(store, name, value):
    (problem,) = verify_shard(shard_path(store, 0), {name: value})
    assert re.search(rf"shard-00000\S+: .*{name}.*{re.escape(str(value))}", problem)


def test_a_shard_that_training_used_up_meanwhile_is_no_problem(store):
    assert verify_shard(shard_path(store, 7), {}) == []


def test_missing_teacher_rows_and_wrong_identities_are_named(store):
    assert verify_store(store) == []
    for first, problems in ((1, 0), (3, 1)):
        write_shard(shard_path(store, 1), [as_harvested(sequence("c", 6), first)], num_target_layers=5)
        artifacts.finish(store, {})
        assert len(verify_store(store)) == problems
    assert re.search(r"shard-00001\S+: sequence c .* 3$", verify_store(store)[0])
    identity = json.loads((store / "identity.json").read_text()) | {"aux_layer_ids": [1, 2]}
    (store / "identity.json").write_text(json.dumps(identity))
    assert verify_store(store)[0].startswith("identity.json")


def test_a_store_without_a_manifest_is_not_called_whole(store):
    (store / "manifest.json").unlink()
    assert "half finished" in verify_store(store)[0]
    assert "does not exist" in verify_store(store / "none")[0]
    (store / "manifest.json").write_text("{")
    assert "manifest.json" in verify_store(store)[0]
