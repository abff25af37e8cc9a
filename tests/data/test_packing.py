"""Packed batches: every window once per epoch, within budget, and the same on every rank."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from drafthead.data.packing import pack, plan_epoch
from drafthead.data.store import StateStore, shard_path, write_shard
from drafthead.data.windows import Window, whole
from tests.data.sequences import sequence


def windows_of(lengths) -> list[Window]:
    return [Window(i, 0, n, 0, n, (n,)) for i, n in enumerate(lengths)]


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_holds_every_window_once_within_budget(lengths, seed, epoch):
    plan = plan_epoch(windows_of(lengths), 100, seed, epoch)
    assert sorted(w.document for batch in plan for w in batch) == list(range(len(lengths)))
    assert all(sum(w.num_tokens for w in batch) <= 100 for batch in plan)
    assert plan == plan_epoch(windows_of(lengths), 100, seed, epoch)


def test_epochs_differ_in_order():
    windows = windows_of([10] * 50)
    assert plan_epoch(windows, 30, 0, 0) != plan_epoch(windows, 30, 0, 1)


def test_budgets_are_well_filled():
    lengths = torch.randint(20, 600, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    plan = plan_epoch(windows_of(lengths), 2048, 0, 0)
    assert sum(lengths) / (len(plan) * 2048) > 0.95


def test_pack_lays_documents_end_to_end(tmp_path):
    documents = [sequence("a", 3), sequence("b", 5)]
    write_shard(shard_path(tmp_path, 0), documents, num_target_layers=9)
    batch = pack(StateStore(tmp_path), [whole(i, d.loss_mask, 2) for i, d in enumerate(documents)])
    assert batch.ids == ("a", "b")
    assert batch.layout.cu_seqlens.tolist() == [0, 3, 8]
    assert batch.positions.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    assert batch.input_ids.tolist() == [0, 1, 2, 0, 1, 2, 3, 4]
    wanted = torch.cat([torch.cat([documents[i].aux[1], documents[i].aux[3]], dim=-1) for i in (0, 1)])
    torch.testing.assert_close(batch.aux, wanted, rtol=0, atol=0)


def test_what_only_the_loss_reads_is_kept_for_the_loss_rows(tmp_path):
    one = sequence("a", 9)
    one.loss_mask[:5] = 0  # tokens 5..8 were generated, so rows begin at 3
    write_shard(shard_path(tmp_path, 0), [one], num_target_layers=9)
    batch = pack(StateStore(tmp_path), [whole(0, one.loss_mask, 2)])
    assert batch.layout.rows.tolist() == [3, 4, 5, 6, 7, 8]
    assert batch.row_ids.tolist() == [3, 4, 5, 6, 7, 8]
    assert batch.loss_mask.tolist() == [False, False, True, True, True, True]
    torch.testing.assert_close(batch.last_hidden, one.last_hidden[3:], rtol=0, atol=0)
    assert batch.argmax.tolist() == [8, 9, 10, 11, 12, 13]


def test_a_window_keeps_its_true_positions_and_counts_its_own_rows(tmp_path):
    one = sequence("a", 12)
    write_shard(shard_path(tmp_path, 0), [one], num_target_layers=9)
    batch = pack(StateStore(tmp_path), [Window(0, 3, 10, 5, 7, (2,))])
    assert batch.positions.tolist() == [3, 4, 5, 6, 7, 8, 9]
    assert batch.row_ids.tolist() == [5, 6, 7, 8, 9]
    assert batch.counted.tolist() == [True, True, False, False, False]
    torch.testing.assert_close(batch.aux[:, :4], one.aux[1][3:10], rtol=0, atol=0)
