"""The store of hidden states: what is written is read, and damage is noticed."""

import pytest
import torch

from drafthead.data.store import Shard, StateSequence, StateStore, shard_path, write_shard
from drafthead.provenance import ArtefactError


def sequence(name: str, length: int, taps=(1, 3), hidden=4) -> StateSequence:
    generator = torch.Generator().manual_seed(length)
    rows = {tap: torch.randn(length, hidden, generator=generator).bfloat16() for tap in taps}
    return StateSequence(
        id=name,
        input_ids=torch.arange(length, dtype=torch.int32),
        loss_mask=(torch.arange(length) > 1).to(torch.uint8),
        aux=rows,
        last_hidden=torch.randn(length, hidden, generator=generator).bfloat16(),
        argmax=torch.arange(length, dtype=torch.int32) + 5,
        lse=torch.randn(length, generator=generator),
    )


def assert_same(found: StateSequence, wanted: StateSequence):
    assert found.id == wanted.id
    for name in ("input_ids", "loss_mask", "last_hidden", "argmax", "lse"):
        torch.testing.assert_close(getattr(found, name), getattr(wanted, name), rtol=0, atol=0)
    assert found.aux.keys() == wanted.aux.keys()
    for tap, rows in wanted.aux.items():
        torch.testing.assert_close(found.aux[tap], rows, rtol=0, atol=0)


def test_sequences_come_back_in_order_over_shards(tmp_path):
    wanted = [sequence("a", 3), sequence("b", 7), sequence("c", 1), sequence("d", 2)]
    write_shard(shard_path(tmp_path, 0), wanted[:3], num_target_layers=5)
    write_shard(shard_path(tmp_path, 1), wanted[3:], num_target_layers=5)
    store = StateStore(tmp_path)
    assert [store[i].num_tokens for i in range(len(store))] == [3, 7, 1, 2]
    assert store.tap_ids == [1, 3]
    for i, expected in enumerate(wanted):
        assert_same(store[i], expected)
    tokens, mask = store.tokens(1)
    assert tokens.tolist() == list(range(7))
    assert mask.tolist() == [False, False, True, True, True, True, True]


def test_the_last_boundary_is_stored_once_when_it_is_a_tap(tmp_path):
    one = sequence("a", 4, taps=(1, 5))
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
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ArtefactError, match="not a whole shard"):
        StateStore(tmp_path)


def test_an_empty_store_says_how_to_fill_it(tmp_path):
    with pytest.raises(ArtefactError, match=r"harvest.py"):
        StateStore(tmp_path)
