"""The command that serves a target, alone or with a head: what is measured here and what a deployment runs."""

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from drafthead.config import Recipe
from drafthead.target.files import pinned_revision

HOST = "127.0.0.1"
SERVER_MODULE = "drafthead.engine.api_server"  # vLLM's own, with its CPU build repaired


def server_command(
    recipe: Recipe, port: int, speculative: dict[str, Any] | None = None, extra_args: Sequence[str] = ()
) -> list[str]:
    """The command that serves the target on `port`; it holds no secret."""
    return [
        sys.executable,
        "-m",
        SERVER_MODULE,
        *server_flags(recipe, speculative),
        # Sampling as requests say, and as offline: otherwise the model's generation_config.json fills in top_k, top_p
        # and min_p, which requests above T = 0 leave out.
        "--generation-config",
        "vllm",
        "--host",
        HOST,
        "--port",
        str(port),
        *extra_args,
    ]


def server_flags(recipe: Recipe, speculative: dict[str, Any] | None = None) -> list[str]:
    """vLLM's flags for the recipe, without address: what a deployment uses too."""
    engine = recipe.engine
    flags = ["--model", recipe.target_path, "--served-model-name", recipe.name]
    flags += ["--dtype", recipe.target.dtype, "--max-model-len", str(engine.max_model_len)]
    flags += ["--max-num-seqs", str(engine.max_num_seqs)]
    if revision := pinned_revision(recipe.target_path, recipe.target.revision):
        flags += ["--revision", revision]
    if recipe.target.trust_remote_code:
        flags += ["--trust-remote-code"]
    if engine.max_num_batched_tokens:
        flags += ["--max-num-batched-tokens", str(engine.max_num_batched_tokens)]
    if engine.tensor_parallel_size > 1:
        flags += ["--tensor-parallel-size", str(engine.tensor_parallel_size)]
    if torch.cuda.is_available():
        flags += ["--gpu-memory-utilization", str(engine.gpu_memory_utilization)]
    else:
        flags += ["--enforce-eager"]
    if speculative:
        flags += ["--speculative-config", json.dumps(speculative)]
    return flags


def server_environment(recipe: Recipe) -> dict[str, str]:
    """What the server's environment needs beyond the caller's own, the key excepted."""
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if not torch.cuda.is_available():
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(recipe.engine.kv_cache_space_gib)
        if recipe.engine.tensor_parallel_size == 1:
            # The model runs inside the engine's process: one Python fewer to start, which is a third of
            # the start-up time on a CPU; tokens per second are the same.
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # One core stays with the HTTP side and the load generator: OpenMP threads that wait for each other
        # spin, and a core too few makes every step tens of times slower.
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(max(1, _cores() - 1))
    return environment


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
