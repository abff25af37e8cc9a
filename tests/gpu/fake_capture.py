"""Captured rows of a step on fake CUDA tensors, through the shard writer; prints where the host waits as JSON."""

import json
from contextlib import nullcontext

from tests.gpu.fake_cuda import Counter  # isort: skip - before torch

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from drafthead.engine.capture import shard_writer
from drafthead.engine.capture.shard_writer import ShardSlot, ShardWriter, SideStream, to_host
from drafthead.target.pieces import TargetHead, TargetPieces

if __name__ == "__main__":
    SideStream.beside = lambda *_: nullcontext()  # a build without CUDA has no streams
    shard_writer.first_teacher_row = lambda mask: 99  # of a mask that has values
    empty = torch.empty
    torch.empty = lambda *size, pin_memory=False, **more: empty(*size, **more)
    slot = ShardSlot("nowhere", 0, 0, 2, "a", 100, 1900)
    input_ids = torch.zeros(2000, dtype=torch.int32)
    with FakeTensorMode(allow_non_fake_inputs=True), Counter([]) as counter:
        pieces = TargetPieces(embed_tokens=empty(0), final_norm=empty(2880), lm_head=empty(1000, 2880))
        head = TargetHead(pieces, 1e-5, torch.bfloat16, "cuda:0")
        counter.waits.clear()
        writer = ShardWriter((2, 18, 33), 36, head)
        rows = empty(2000, 4, 2880, dtype=torch.bfloat16, device="cuda:0")
        writer.add(slot, input_ids, rows)
        to_host(rows)
    writer.close()
    print(json.dumps(counter.waits))
