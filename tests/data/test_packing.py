"""Packed batches: every document once per epoch, within budget, and the same on every rank."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafthead.data.packing import check_lengths, pack, plan_epoch
from drafthead.data.store import StateStore, shard_path, write_shard
from tests.data.test_store import sequence


@given(st.lists(st.integers(1, 100), min_size=1, max_size=60), st.integers(0, 5), st.integers(0, 3))
def test_an_epoch_holds_every_document_once_within_budget(lengths, seed, epoch):
    plan = plan_epoch(lengths, 100, seed, epoch)
    assert sorted(i for batch in plan for i in batch) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in batch) <= 100 for batch in plan)
    assert plan == plan_epoch(lengths, 100, seed, epoch)


def test_epochs_differ_in_order():
    lengths = [10] * 50
    assert plan_epoch(lengths, 30, 0, 0) != plan_epoch(lengths, 30, 0, 1)


def test_budgets_are_well_filled():
    lengths = torch.randint(20, 600, (400,), generator=torch.Generator().manual_seed(0)).tolist()
    plan = plan_epoch(lengths, 2048, 0, 0)
    assert sum(lengths) / (len(plan) * 2048) > 0.95


def test_a_document_no_batch_can_hold_is_refused():
    with pytest.raises(ValueError, match="has 300 tokens but train.tokens_per_batch is 256"):
        check_lengths([10, 300], 256)


def test_pack_lays_documents_end_to_end(tmp_path):
    documents = [sequence("a", 3), sequence("b", 5)]
    write_shard(shard_path(tmp_path, 0), documents, num_target_layers=9)
    batch = pack(StateStore(tmp_path), [0, 1])
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
    batch = pack(StateStore(tmp_path), [0])
    assert batch.layout.rows.tolist() == [3, 4, 5, 6, 7, 8]
    assert batch.row_ids.tolist() == [3, 4, 5, 6, 7, 8]
    assert batch.loss_mask.tolist() == [False, False, True, True, True, True]
    torch.testing.assert_close(batch.last_hidden, one.last_hidden[3:], rtol=0, atol=0)
    assert batch.argmax.tolist() == [8, 9, 10, 11, 12, 13]


def test_a_document_without_generated_tokens_is_refused(tmp_path):
    one = sequence("a", 4)
    one.loss_mask[:] = 0
    write_shard(shard_path(tmp_path, 0), [one], num_target_layers=9)
    with pytest.raises(ValueError, match="without a generated token"):
        pack(StateStore(tmp_path), [0])
