"""Streams as a server or a network may cut them: times, errors, and when the final channel begins."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from drafthead.config.evaluation import EndpointConfig, LoadConfig
from drafthead.engine.load import (
    LoadRequest,
    RequestTimes,
    endpoint_server,
    final_channel_s,
    read_events,
    run_load,
    stream_request,
)
from drafthead.engine.server import Server, ServerError
from tests.engine.replying import replying


def _received(chunks: list[bytes], status: int = 200, max_tokens: int | None = None) -> RequestTimes:
    """What is measured of a response that arrives in these pieces."""

    async def serve(request: web.Request) -> web.StreamResponse:
        expected_body = {"model": "m", "prompt": [1, 2], "max_tokens": max_tokens or 9}
        assert await request.json() == expected_body
        response = web.StreamResponse(status=status)
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            await asyncio.sleep(0.01)
        return response

    async def run() -> RequestTimes:
        application = web.Application()
        application.router.add_post("/v1/completions", serve)
        async with TestServer(application) as server, ClientSession(str(server.make_url("/"))) as session:
            request = LoadRequest("p", [1, 2], max_tokens=max_tokens)
            return await stream_request(session, request, {"model": "m", "max_tokens": 9}, time.perf_counter())

    return asyncio.run(run())


def _texts(*texts: str) -> list[bytes]:
    return [f"data: {json.dumps({'choices': [{'text': text}]})}\n\n".encode() for text in texts]


USAGE = b'data: {"usage": {"completion_tokens": 7, "prompt_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"
DEAD = b'data: {"error": {"message": "engine dead"}}\n\n'


def test_a_stream_is_timed_chunk_by_chunk():
    times = _received([*_texts("a", "b", "c"), USAGE, DONE])
    assert (times.text, times.output_tokens, times.prompt_tokens, times.error) == ("abc", 7, 2, "")
    assert len(times.gaps_s) == 2
    assert min(times.gaps_s) > 0.005
    assert times.latency_s == pytest.approx(times.ttft_s + sum(times.gaps_s))
    cut = b"".join(_texts("a", "b"))
    assert _received([cut[:20], cut[20:], USAGE]).text == "ab"  # a message in two pieces
    assert not _received([*_texts("a"), USAGE, DONE], max_tokens=3).error  # of this request alone


@pytest.mark.parametrize(
    ("chunks", "status", "error"),
    [
        ([DONE], 200, "cut short"),
        ([DEAD, DONE], 200, "engine dead"),
        ([b'data: {"choices": [\n\n', USAGE, DONE], 200, "DecodeError"),
        ([b"data: 7\n\n", USAGE, DONE], 200, "no JSON object"),
        ([], 503, "503"),
    ],
)
def test_a_response_that_breaks_off_or_is_none_is_a_failure_of_its_request(chunks, status, error):
    assert error in _received([*_texts("Yes"), *chunks], status).error


def _events(*chunks: bytes) -> list[str]:
    async def arriving() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    async def run() -> list[str]:
        return [data async for data in read_events(arriving())]

    return asyncio.run(run())


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_event_streams_are_read_by_the_standard(end):
    """In whatever pieces they arrive."""
    lines = [
        "\ufeff: a comment", "event: x", "data:a", "", "data: b", "data:  c", "id", "", "", "data:", "", "data", "",
        "date: d", "", "data: \u00e9:\u2028", "retry: 3", "", "data: no end",
    ]  # fmt: skip
    stream = end.join(lines).encode()
    expected = ["a", "b\n c", "\u00e9:\u2028"]
    assert _events(stream) == expected
    assert _events(*(stream[i : i + 1] for i in range(len(stream)))) == expected
    assert _events(b"data: a\r", b"", b"\ndata: b\r", b"\n\r", b"\n") == ["a\nb"]


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("data: ", "data:"),
        lambda text: text.replace("\n", "\r\n"),
        lambda text: ": ping\n\n" + text.replace("}, ", "},\ndata: "),
    ],
)
def test_an_endpoint_below_a_path_is_measured_whatever_its_stream_looks_like(change):
    page = change(b"".join([*_texts("a", "b"), USAGE, DONE]).decode())
    requested: list[str] = []

    def reply() -> str:
        return json.dumps({"data": [{"id": "m"}]}) if requested[-1].endswith("models") else page

    with replying(reply, requested=requested) as url:
        for prefix in ("/team/a/v1/", "/team/a"):
            server = endpoint_server(EndpointConfig(name="other", url=url + prefix, model="m"))
            load = LoadConfig(concurrency=1)
            (request,) = run_load(server, [LoadRequest("p", [1])], load=load, max_tokens=4).requests
            assert (request.error, request.text, request.output_tokens) == ("", "ab", 7)
    assert set(requested) == {f"/team/a/{path}" for path in ("v1/models", "v1/completions", "metrics")}


@pytest.mark.parametrize(
    ("pieces", "index"),
    [
        (("<|channel|>", "analysis<|message|>hm", "<|end|><|channel|>final", "<|message|>", "Yes"), 4),
        (("Yes", "no"), 0),  # without channels
        (("<|channel|>analysis<|message|>hm",), None),
        (("<|channel|>final<|message|>", ""), None),
    ],
)
def test_the_final_channel_begins_after_its_marker(pieces, index):
    seconds = final_channel_s(pieces, [float(i) for i in range(len(pieces))])
    assert math.isnan(seconds) if index is None else seconds == index


def test_an_endpoint_that_does_not_answer_or_lists_no_models_is_named():
    with replying(lambda: '{"status": "ok"}') as url:
        for where, said in (("http://127.0.0.1:9", ""), (url, ".*'data'")):
            with pytest.raises(ServerError, match=f"endpoint other at {where}:{said}"):
                endpoint_server(EndpointConfig(name="other", url=where, model="m"))


def test_no_request_is_lost_on_a_connection_that_the_server_gives_up():
    page = b"".join([*_texts("a"), USAGE, DONE]).decode()
    with replying(lambda: page, idle_s=1.5) as url:
        load = LoadConfig(request_rate=0.5, burstiness=1000)
        result = run_load(Server(url, "m", ""), [LoadRequest(n, [1, 2]) for n in "ab"], load=load, max_tokens=4)
    assert [request.error for request in result.requests] == ["", ""]


def test_a_long_response_says_of_every_step_what_was_accepted():
    """In one line, longer than aiohttp reads by itself; without drafts there is none."""
    steps = [1, 0, 3] * 100_000
    told = json.dumps({"metrics": {"speculative_decoding": {"per_step_accepted": steps}}})
    pages = [b"".join([*_texts("a"), last, USAGE, DONE]).decode() for last in (f"data: {told}\n\n".encode(), b"")]
    for page, expected in zip(pages, (steps, []), strict=True):
        with replying(lambda page=page: page) as url:
            load = LoadConfig(concurrency=1)
            (request,) = run_load(Server(url, "m", ""), [LoadRequest("p", [1])], load=load, max_tokens=4).requests
        assert (request.error, request.accepted_by_step) == ("", expected)
