"""Texts of shards, a writer of states with four dimensions, a configuration of vLLM's for its caches."""

from types import SimpleNamespace
from typing import Any

import torch

from drafthead.engine.shard_writer import SequenceSpec, ShardWriter
from drafthead.target.pieces import TargetHead, TargetPieces


def sequence_specs(shard: int, texts: list[list[int]]) -> list[SequenceSpec]:
    """Sequences of a shard with these token ids; two tokens in the middle of each are learned."""
    return [
        SequenceSpec(f"{shard}-{i}", text, bytes([0] * (len(text) // 2) + [1, 1] + [0] * len(text))[: len(text)])
        for i, text in enumerate(texts)
    ]


def config_without_model(max_model_len: int) -> Any:
    """vLLM's configuration, as far as its arithmetic of KV caches reads it."""
    from vllm.config import VllmConfig

    config = VllmConfig()
    config.model_config = SimpleNamespace(
        max_model_len=max_model_len,
        is_hybrid=False,
        use_mla=False,
        hf_config=SimpleNamespace(),
        is_encoder_decoder=False,
    )
    config.cache_config.kv_cache_layout = "LBNHC"
    return config


def writer_of(num_layers: int) -> ShardWriter:
    pieces = TargetPieces(SimpleNamespace(rms_norm_eps=1e-5), torch.eye(4), torch.ones(4), torch.eye(4))
    return ShardWriter((1,), num_layers, TargetHead(pieces, torch.float32))
