"""A real vLLM server on the tiny target: who may ask, what it counts, and that nothing is left behind."""

import os
import socket
from pathlib import Path

import httpx
import pytest

from drafthead.config import load_recipe
from drafthead.eval_config import LoadConfig
from drafthead.serving.load import LoadRequest, run_load, warm_up
from drafthead.serving.server import ServerError, parse_metrics, running_server, server_command

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
PROMPTS = [LoadRequest(f"p{i}", [5, 6, 7, 20 + i, 30, 31, 30, 31]) for i in range(6)]


def test_metrics_are_summed_over_labels_and_keep_positions():
    page = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 3.0
vllm:spec_decode_num_drafts_total{engine="1"} 4.0
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2.0
# TYPE vllm:e2e histogram
vllm:e2e_bucket{le="+Inf"} 1.0
vllm:e2e_sum 1.0
vllm:e2e_count 1.0
"""
    assert parse_metrics(page) == {
        "vllm:spec_decode_num_drafts": 7.0,
        "vllm:spec_decode_num_accepted_tokens_per_pos[1]": 2.0,
    }


def test_the_command_binds_to_loopback_and_holds_no_key():
    command = server_command(load_recipe(), 12345, NGRAM)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert not any("key" in part for part in command)


@pytest.mark.slow
def test_a_server_from_start_to_end(tmp_path):
    with running_server(load_recipe(), tmp_path / "server.log", speculative=NGRAM) as server:
        assert server.api_key not in repr(server)
        assert server.api_key not in " ".join(server.command)
        without_key = httpx.get(f"{server.base_url}/v1/models", trust_env=False)
        assert without_key.status_code == httpx.codes.UNAUTHORIZED
        assert not _listens_beyond_loopback(server.port)

        warm_up(server, PROMPTS[:2], max_tokens=8)
        server.reset_prefix_cache()
        before = server.metrics()
        result = run_load(server, PROMPTS, tmp_path, load=LoadConfig(concurrency=3), max_tokens=16, label="level")
        counted = server.metrics()["vllm:generation_tokens"] - before["vllm:generation_tokens"]
        group = os.getpgid(_listener(server.port))

    assert [r.id for r in result.requests] == [p.id for p in PROMPTS]
    assert not any(r.error for r in result.requests)
    assert sum(r.output_tokens for r in result.requests) == counted
    for request, prompt in zip(result.requests, PROMPTS, strict=True):
        assert request.prompt_tokens == len(prompt.prompt_ids)
        assert request.latency_s == pytest.approx(request.ttft_s + sum(request.gaps_s))
    assert server.api_key not in (tmp_path / "server.log").read_text()
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


@pytest.mark.slow
def test_a_server_that_dies_shows_its_last_words(tmp_path):
    with (
        pytest.raises(ServerError, match=r"(?s)ended with code 2.*unrecognized arguments: --no-such-flag"),
        running_server(load_recipe(), tmp_path / "server.log", extra_args=["--no-such-flag"]),
    ):
        pass


def _listens_beyond_loopback(port: int) -> bool:
    """Whether another address of this machine answers on the port."""
    try:
        address = socket.gethostbyname(socket.gethostname())
        with socket.create_connection((address, port), timeout=1):
            return not address.startswith("127.")
    except OSError:
        return False


def _listener(port: int) -> int:
    """The process that listens on a port of the loopback address, from /proc."""
    wanted = f"0100007F:{port:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[1] == wanted}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            links = {os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")}
        except OSError:
            continue
        if links & inodes:
            return int(pid)
    raise AssertionError(f"nothing listens on {port}")
