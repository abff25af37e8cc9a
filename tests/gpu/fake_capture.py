"""Captured rows of a step on fake CUDA tensors, on their way to the host; prints where the host waits as JSON."""

import json
from types import SimpleNamespace

from tests.gpu.fake_cuda import Counter  # isort: skip - before torch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from drafthead.engine.connector import HiddenStatesConnector
from drafthead.engine.shard_writer import to_host

if __name__ == "__main__":
    empty = torch.empty  # a build without CUDA pins nothing
    torch.empty = lambda *size, pin_memory=False, **more: empty(*size, **more)
    torch.Tensor.pin_memory = lambda self: self
    request = SimpleNamespace(start=0, stop=2000, block_ids=list(range(125)))
    with FakeTensorMode(allow_non_fake_inputs=True), Counter([]) as counter:
        cache = empty(200, 4, 16, 2880, dtype=torch.bfloat16, device="cuda:0")
        counter.waits.clear()
        rows = HiddenStatesConnector._copy(SimpleNamespace(_block_size=16), cache, [request, request])
        assert rows.shape == (4000, 4, 2880)
        to_host(rows)
    print(json.dumps(counter.waits))
