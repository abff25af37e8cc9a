"""Places in shards, and a writer for them, of states with four dimensions."""

from pathlib import Path

import torch

from drafthead.engine.shard_writer import ShardSlot, ShardWriter
from drafthead.target.pieces import TargetHead, TargetPieces


def slots(directory: Path, shard: int, texts: list[list[int]]) -> list[ShardSlot]:
    return [
        ShardSlot(str(directory), shard, i, len(texts), f"{shard}-{i}", len(t) // 2, 2) for i, t in enumerate(texts)
    ]


def writer_of(num_layers: int) -> ShardWriter:
    pieces = TargetPieces(torch.eye(4), torch.ones(4), torch.eye(4))
    return ShardWriter((1,), num_layers, TargetHead(pieces, 1e-5, torch.float32))
