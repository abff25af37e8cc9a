"""What a server has left for requests after loading its weights, from its own log.

The counters on /metrics know the cache in blocks only; with several cache groups (a draft head, sliding windows) the
number of tokens is what vLLM computes and logs.
"""

import re
from pathlib import Path

_TOKENS = re.compile(r"KV cache size: ([\d,]+) tokens")  # vllm/v1/core/kv_cache_utils.py
_WEIGHTS = re.compile(r"Model loading took ([\d.]+) GiB")  # vllm/v1/worker/gpu_model_runner.py; not on the CPU build


def server_capacity(log: Path | None) -> dict[str, float]:
    """`kv_cache_tokens`, tokens that fit, and `weights_gib`, memory of target and draft weights on one GPU.

    NaN for what the log does not say, or where there is none.
    """
    text = log.read_text(encoding="utf-8", errors="replace") if log and log.is_file() else ""
    found = {"kv_cache_tokens": _TOKENS.findall(text), "weights_gib": _WEIGHTS.findall(text)}
    return {
        key: max((float(value.replace(",", "")) for value in values), default=float("nan"))
        for key, values in found.items()
    }
