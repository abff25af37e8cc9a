"""Rows that do not fit their shard are refused."""

from pathlib import Path

import pytest
import torch

from drafthead.data.shard import shard_path
from drafthead.engine.shard_writer import KeptRows
from tests.engine.shards import sequence_specs, writer_of


def test_an_error_on_the_thread_reaches_the_caller_and_the_engines_threads_stay(tmp_path: Path):
    before = torch.get_num_threads()
    writer, path = writer_of(2), shard_path(tmp_path, 0)
    with pytest.raises(ValueError, match=r"0-0.*\(3, 2, 4\).*\(2 tokens, 2 boundaries, H\)"):
        writer.write(path, sequence_specs(0, [[1, 2]]), [torch.randn(3, 2, 4)])
    writer.write(path, sequence_specs(0, [[1, 2, 3]]), [torch.randn(3, 2, 5)])  # lm_head reads states of 4
    with pytest.raises(RuntimeError, match="size of tensor|must match"):
        writer.finish()
    writer.close()
    assert torch.get_num_threads() == before


def test_kept_rows_of_all_steps_come_in_order():
    kept_rows = KeptRows()
    rows = torch.randn(5, 2, 4)
    kept_rows.add("a", 0, torch.randn(3, 2, 4))  # an earlier request of that name
    kept_rows.add("a", 0, rows[:3])
    kept_rows.add("b", 0, rows)
    kept_rows.add("a", 3, rows[3:4])
    kept_rows.add("a", 4, rows[4:])
    assert torch.equal(kept_rows.take("a", 5), rows)
    assert torch.equal(kept_rows.take("b", 5), rows)


@pytest.mark.parametrize(("rows", "tokens"), [(3, 4), (3, 2), (0, 3)])
def test_missing_and_surplus_kept_rows_are_errors(rows, tokens):
    kept_rows = KeptRows()
    kept_rows.add("a", 0, torch.randn(3, 2, 4))
    if not rows:
        kept_rows.clear()
    with pytest.raises(ValueError, match=rf"a: .* {rows} tokens .* {tokens};"):
        kept_rows.take("a", tokens)
