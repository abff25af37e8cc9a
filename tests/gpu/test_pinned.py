"""Page-locked memory: without it a copy to the GPU keeps the host waiting, whatever non_blocking says."""

import torch

from drafthead.drafters.batch import PackedBatch, tail_layout


def test_every_tensor_of_a_batch_is_pinned(monkeypatch):
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda self: pinned.append(self) or self)
    names = ("input_ids", "positions", "aux", "loss_mask", "of_row", "last_hidden", "argmax", "lse", "aux_scale")
    tensors = {name: torch.zeros(4) for name in names} | {"scored": torch.ones(2, 4, dtype=torch.bool)}
    batch = PackedBatch(layout=tail_layout([4], [1]), **tensors).prepared(2, "cuda")
    batch.pinned()
    layout = (batch.layout.cu_seqlens, batch.layout.rows, batch.layout.cu_rows)
    assert {id(t) for t in pinned} == {id(t) for t in (*layout, *tensors.values(), *batch.chunks[:3])}
