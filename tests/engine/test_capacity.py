"""Lines of vLLM's log, as its 0.32 words them, to the memory that a head takes away."""

import math

from drafthead.engine.capacity import server_capacity

CPU = (
    "INFO [kv_cache_utils.py:2327] CPU KV cache size: 493,447 tokens, Maximum concurrency for 1,024 tokens per request"
)
GPU = "INFO [gpu_model_runner.py:5150] Model loading took 65.97 GiB memory and 21.6 seconds\n" + CPU.replace(
    "CPU", "GPU"
)


def test_capacity_is_read_from_the_log(tmp_path):
    log = tmp_path / "server.log"
    log.write_text(CPU)
    found = server_capacity(log)
    assert found["kv_cache_tokens"] == 493_447
    assert math.isnan(found["weights_gib"])
    log.write_text(GPU)
    assert server_capacity(log) == {"kv_cache_tokens": 493_447, "weights_gib": 65.97}


def test_a_server_without_a_log_says_nothing(tmp_path):
    assert all(math.isnan(value) for value in server_capacity(tmp_path / "none.log").values())
