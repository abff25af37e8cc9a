"""A real vLLM server on the tiny target: its key, its counters, its log, and that it leaves nothing behind."""

import json
import math
import os
from pathlib import Path

import httpx
import pytest
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

from drafthead.config import load_recipe
from drafthead.config.evaluation import EndpointConfig, LoadConfig
from drafthead.engine import server as module
from drafthead.engine.load import LoadRequest, endpoint_server, run_load, send_times, warm_up
from drafthead.engine.server import Server, ServerError, parse_metrics, running_server, server_capacity, server_command
from tests.engine.replying import replying
from tests.faults.secrets import MARKER, files_with, set_secrets

NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 2}
PROMPTS = [LoadRequest(f"p{i}", [5, 6, 7, 20 + i, 30, 31, 30, 31]) for i in range(6)]


def test_metrics_are_summed_over_labels_and_keep_positions():
    page = """# TYPE vllm:spec_decode_num_drafts_total counter
vllm:spec_decode_num_drafts_total{engine="0"} 3.0
vllm:spec_decode_num_drafts_total{engine="1"} 4.0
# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2.0
# HELP vllm:num_requests_waiting of all reasons
vllm:num_requests_waiting{engine="0"} 2.0
vllm:num_requests_waiting_by_reason{engine="0",reason="capacity"} 2.0
"""
    assert parse_metrics(page) == {
        "vllm:spec_decode_num_drafts": 7.0,
        "vllm:spec_decode_num_accepted_tokens_per_pos[1]": 2.0,
        "vllm:num_requests_waiting": 2.0,
        "vllm:num_requests_waiting_by_reason": 2.0,
    }


CPU_LOG = "INFO [kv_cache_utils.py:2327] CPU KV cache size: 493,447 tokens, Maximum concurrency for 1,024 tokens"
GPU_LOG = "INFO [gpu_model_runner.py:5150] Model loading took 65.97 GiB memory and 21.6 seconds\n" + CPU_LOG


@pytest.mark.parametrize(
    ("log", "tokens", "gib"), [(CPU_LOG, 493_447, math.nan), (GPU_LOG, 493_447, 65.97), (None, math.nan, math.nan)]
)
def test_capacity_is_read_from_the_log_of_vllm_0_32(tmp_path, log, tokens, gib):
    path = tmp_path / "server.log"
    if log:
        path.write_text(log)
    assert server_capacity(path) == pytest.approx({"kv_cache_tokens": tokens, "weights_gib": gib}, nan_ok=True)


def test_the_command_binds_to_loopback_and_holds_no_key():
    command = server_command(load_recipe(), 12345, NGRAM)
    assert command[command.index("--host") + 1] == "127.0.0.1"
    assert not any("key" in part for part in command)
    assert command[command.index("--generation-config") + 1] == "vllm"


def test_servers_tell_the_chat_template_of_clients_what_the_recipe_does():
    recipe = load_recipe(overrides=["target.chat_template_kwargs={enable_thinking: false}"])
    command = server_command(recipe, 12345, NGRAM)
    values = make_arg_parser(FlexibleArgumentParser()).parse_args(command[3:])
    assert values.default_chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.slow
def test_a_server_counts_tokens_keeps_its_key_and_leaves_nothing(tmp_path, monkeypatch):
    set_secrets(monkeypatch)
    recipe = load_recipe(overrides=["engine.max_num_seqs=2"])
    with running_server(recipe, tmp_path / "server.log", speculative=NGRAM) as server:
        assert server.api_key not in repr(server)
        assert server.api_key not in " ".join(server.command)
        without_key = httpx.get(f"{server.base_url}/v1/models", trust_env=False)
        assert without_key.status_code == httpx.codes.UNAUTHORIZED

        warm_up(server, PROMPTS[:2], max_tokens=8)
        server.reset_prefix_cache()
        before = server.metrics()
        result = run_load(server, PROMPTS, load=LoadConfig(concurrency=3), max_tokens=16)
        counted = server.metrics()["vllm:generation_tokens"] - before["vllm:generation_tokens"]
        _check_a_rate(server)
        _check_a_load_of_six(server)
        _check_as_endpoint(server, monkeypatch)
        group = os.getpgid(server.process.pid)
        seen_by_ps = Path(f"/proc/{server.process.pid}/cmdline").read_text()
        assert server.api_key not in seen_by_ps

    assert [r.id for r in result.requests] == [p.id for p in PROMPTS]
    assert not any(r.error for r in result.requests)
    assert sum(r.output_tokens for r in result.requests) == counted
    for request, prompt in zip(result.requests, PROMPTS, strict=True):
        assert request.prompt_tokens == len(prompt.prompt_ids)
        assert request.ttft_s <= request.ttfot_s or math.isnan(request.ttfot_s)
        assert request.latency_s == pytest.approx(request.ttft_s + sum(request.gaps_s))
    assert (tmp_path / "server.log").stat().st_size
    assert not files_with(tmp_path, server.api_key)
    assert not files_with(tmp_path, MARKER)
    with pytest.raises(ProcessLookupError):
        os.killpg(group, 0)


def _check_a_rate(server: Server) -> None:
    """Requests at a rate are sent one after the other, and not too soon."""
    load = LoadConfig(request_rate=20, burstiness=0.5)
    result = run_load(server, PROMPTS, load=load, max_tokens=4, temperature=0.7, ignore_eos=True)
    assert {r.output_tokens for r in result.requests} == {4}
    sent = [r.start_s for r in result.requests]
    assert sent == sorted(sent)
    assert sent[-1] > 0.9 * send_times(load, len(PROMPTS))[-1]


def _check_a_load_of_six(server: Server) -> None:
    """It runs two at a time: the others wait."""
    result = run_load(server, PROMPTS * 2, load=LoadConfig(concurrency=6), max_tokens=64, ignore_eos=True)
    assert max(sample.running for sample in result.samples) == 2
    assert max(sample.waiting for sample in result.samples) >= 3


def _check_as_endpoint(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same server as if somebody else had started it."""
    endpoint = {"name": "theirs", "url": server.base_url + "/", "model": server.model, "api_key_env": "THEIR_KEY"}
    with pytest.raises(ServerError, match="THEIR_KEY"):
        endpoint_server(EndpointConfig(**endpoint))
    monkeypatch.setenv("THEIR_KEY", server.api_key)
    theirs = endpoint_server(EndpointConfig(**endpoint))
    warm_up(theirs, PROMPTS[:1], max_tokens=2)
    assert theirs.metrics()["vllm:generation_tokens"] > 0
    with pytest.raises(ServerError, match="other"):
        endpoint_server(EndpointConfig(**endpoint | {"model": "other"}))
    with pytest.raises(ServerError, match="401"):
        endpoint_server(EndpointConfig(**{k: v for k, v in endpoint.items() if k != "api_key_env"}))


@pytest.mark.parametrize("status", [200, 302, 404])
def test_an_endpoint_that_does_not_tell_its_metrics_has_none(status):
    with replying(lambda: 'vllm:generation_tokens_total{engine="0"} 7.0', status=status) as url:
        metrics = Server(url, "theirs", "key").metrics()
    assert metrics == ({"vllm:generation_tokens": 7.0} if status == 200 else {})


def test_a_server_that_dies_at_its_start_shows_the_end_of_its_log(tmp_path, monkeypatch):
    """A module that does not know vLLM's flags, and ends as vLLM does, without its import."""
    monkeypatch.setattr(module, "SERVER_MODULE", "tokenize")
    with (
        pytest.raises(ServerError, match=r"(?s)code 2.*--no-such-flag"),
        running_server(load_recipe(), tmp_path / "server.log", extra_args=["--no-such-flag"]),
    ):
        pass


def test_another_server_on_the_port_is_not_taken_for_ours(tmp_path, monkeypatch):
    """It answers at once, long before ours has started and would have found the port taken."""
    with replying(lambda: "{}") as url:
        port = int(url.rpartition(":")[2])
        monkeypatch.setattr(module, "_free_port", lambda: port)
        with pytest.raises(ServerError, match=url), running_server(load_recipe(), tmp_path / "server.log"):
            pass


def test_a_cache_that_is_not_reset_at_once_is_reset_again(tmp_path):
    """vLLM returns code 200 and success false while blocks are still held."""
    results = iter([False, False, True])
    with replying(lambda: json.dumps({"success": next(results, False)})) as url:
        ours = Server(url, "m", "key", tmp_path / "server.log")
        assert ours.reset_prefix_cache()
        with pytest.raises(ServerError, match="reset_prefix_cache"):
            ours.reset_prefix_cache(patience_s=0)
        assert not Server(url, "m", "key").reset_prefix_cache(patience_s=0)
