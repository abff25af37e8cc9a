"""The store of hidden states: what is written is read, and damage is noticed."""

from types import SimpleNamespace

import pytest
import torch

from drafthead.data.store import Shard, StateStore, shard_path, write_shard
from drafthead.provenance import ArtefactError
from drafthead.files import DiskFullError
from tests.damage import cut_short
from tests.data.sequences import assert_same, sequence
from tests.scripts import run_python


def test_sequences_come_back_in_order_over_shards(tmp_path):
    wanted = [sequence("a", 3), sequence("b", 7), sequence("c", 1), sequence("d", 2)]
    write_shard(shard_path(tmp_path, 0), wanted[:3], num_target_layers=5)
    write_shard(shard_path(tmp_path, 1), wanted[3:], num_target_layers=5)
    store = StateStore(tmp_path)
    assert [store[i].num_tokens for i in range(len(store))] == [3, 7, 1, 2]
    assert store.aux_layer_ids == [1, 3]
    for i, expected in enumerate(wanted):
        assert_same(store[i], expected)
    tokens, mask = store.tokens(1)
    assert tokens.tolist() == list(range(7))
    assert mask.tolist() == [False, False, True, True, True, True, True]


def test_the_last_boundary_is_stored_once_when_it_is_a_tap(tmp_path):
    one = sequence("a", 4, layers=(1, 5))
    write_shard(tmp_path / "s.safetensors", [one], num_target_layers=5)
    shard = Shard(tmp_path / "s.safetensors")
    assert "last_hidden" not in shard._file.keys()  # noqa: SIM118
    torch.testing.assert_close(shard[0].last_hidden, one.aux[5], rtol=0, atol=0)


def test_rows_that_disagree_are_refused(tmp_path):
    broken = sequence("bad", 4)
    broken.aux[3] = broken.aux[3][:2]
    with pytest.raises(ValueError, match=r"sequence bad: aux.3 has 2 rows but input_ids has 4"):
        write_shard(tmp_path / "s.safetensors", [broken], num_target_layers=5)
    assert not list(tmp_path.iterdir())


def test_nothing_to_write_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no sequences"):
        write_shard(tmp_path / "s.safetensors", [], num_target_layers=5)


def test_a_truncated_shard_is_named(tmp_path):
    path = shard_path(tmp_path, 0)
    write_shard(path, [sequence("a", 50)], num_target_layers=5)
    cut_short(path)
    with pytest.raises(ArtefactError, match="not a whole shard"):
        StateStore(tmp_path)


def test_an_empty_store_says_how_to_fill_it(tmp_path):
    with pytest.raises(ArtefactError, match=r"harvest.py"):
        StateStore(tmp_path)


def test_a_shard_that_will_not_fit_is_not_begun(tmp_path, monkeypatch):
    write_shard(shard_path(tmp_path, 0), [sequence("a", 9)], num_target_layers=5)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=3))
    with pytest.raises(DiskFullError, match=r"shard-00001\S+: it needs [\d,]+ bytes and 3 are free; what was finished"):
        write_shard(shard_path(tmp_path, 1), [sequence("b", 9)], num_target_layers=5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".shard-00000.sha256", "shard-00000.safetensors"]


OUTGROWS = """
import resource, sys
from pathlib import Path
from drafthead.data.store import shard_path, write_shard
from tests.data.sequences import sequence
directory = Path(sys.argv[1])
write_shard(shard_path(directory, 0), [sequence("a", 9)], 5)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
write_shard(shard_path(directory, 1), [sequence("b", 9000)], 5)
"""


def test_a_write_that_fails_midway_leaves_no_partial_shard(tmp_path):
    result = run_python("-c", OUTGROWS, str(tmp_path))
    assert "DiskFullError: no room for" in result.stderr
    assert "File too large" in result.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == [".shard-00000.sha256", "shard-00000.safetensors"]
    assert len(Shard(shard_path(tmp_path, 0))) == 1
