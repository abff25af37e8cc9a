"""What arrives of a shard, in any order, is written once it is complete."""

from pathlib import Path

import pytest
import torch

from drafthead.data.store import shard_path
from tests.engine.slots import slots, writer_of


def test_arrival_order_does_not_change_a_shard(tmp_path: Path):
    texts = [[1, 2, 3], [2, 3], [3, 1, 0, 2]]
    rows = [torch.randn(len(text), 2, 4) for text in texts]
    written = []
    for name, order in (("forward", [0, 1, 2]), ("backward", [2, 1, 0]), ("aside", [1, 0, 2])):
        writer, places = writer_of(2, aside=name == "aside"), slots(tmp_path / name, 0, texts)
        for i in order:
            writer.add(places[i], torch.tensor(texts[i]), rows[i])
        writer.finish()
        writer.close()
        written.append(shard_path(tmp_path / name, 0).read_bytes())
    assert written[0] == written[1] == written[2]


def test_what_fails_on_the_thread_reaches_the_caller_and_the_engines_threads_stay(tmp_path: Path):
    before = torch.get_num_threads()
    writer, (place,) = writer_of(2, aside=True), slots(tmp_path, 0, [[1, 2, 3]])
    writer.add(place, torch.tensor([1, 2, 3]), torch.randn(3, 2, 5))  # lm_head reads states of 4
    with pytest.raises(RuntimeError, match="size of tensor|must match"):
        writer.finish()
    writer.close()
    assert torch.get_num_threads() == before


def test_incomplete_and_wrong_rows_are_errors(tmp_path: Path):
    writer, places = writer_of(2), slots(tmp_path, 0, [[1, 2], [3, 1]])
    with pytest.raises(ValueError, match=r"shape \(3, 2, 4\), wanted \(2 tokens, 2 boundaries, H\)"):
        writer.add(places[0], torch.tensor([1, 2]), torch.randn(3, 2, 4))
    writer.add(places[0], torch.tensor([1, 2]), torch.randn(2, 2, 4))
    with pytest.raises(ValueError, match="arrived twice"):
        writer.add(places[0], torch.tensor([1, 2]), torch.randn(2, 2, 4))
    with pytest.raises(ValueError, match="only 1 of its sequences arrived"):
        writer.finish()
    writer.close()
