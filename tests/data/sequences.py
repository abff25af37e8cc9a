"""Sequences of random states, small enough to be compared whole."""

import torch

from drafthead.data.store import StateSequence


def sequence(name: str, length: int, layers=(1, 3), hidden=4) -> StateSequence:
    generator = torch.Generator().manual_seed(length)
    rows = {layer_id: torch.randn(length, hidden, generator=generator).bfloat16() for layer_id in layers}
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
    for layer_id, rows in wanted.aux.items():
        torch.testing.assert_close(found.aux[layer_id], rows, rtol=0, atol=0)
