"""The flags of a load, and a stream cut where a network may cut it: when its final channel begins."""

import asyncio
import json
import math
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from drafthead.config.evaluation import EndpointConfig, LoadConfig
from drafthead.engine.load import ResponseClock, endpoint_server, load_flags
from drafthead.engine.server import ServerError


def stream(*texts: str) -> list[bytes]:
    lines = [f"data: {json.dumps({'choices': [{'text': text}]})}\n\n".encode() for text in texts]
    return [*lines, b"data: [DONE]\n\n"]


@asynccontextmanager
async def server_of(chunks: list[bytes], read: asyncio.Event | None = None) -> AsyncIterator[tuple[str, ClientSession]]:
    """A server that sends these chunks, and waits for `read` after each; its URL and a session for requests to it."""

    async def serve(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for chunk in chunks:
            await response.write(chunk)
            if read:
                await read.wait()
                read.clear()
        return response

    application = web.Application()
    application.router.add_post("/v1/completions", serve)
    async with TestServer(application) as server, ClientSession() as session:
        yield str(server.make_url("/v1/completions")), session


def chunk_of_final(chunks: list[bytes]) -> int | None:
    """Index of the chunk, sent one by one, that the time of the final channel falls on; None where it has none.

    The server waits with a chunk until the one before has been read, so that each arrives alone.
    """
    times: list[float] = []
    read = asyncio.Event()

    async def send(request: Any, session: ClientSession, _pbar: Any) -> SimpleNamespace:
        """As vLLM's client does: reads to the end, and notes when the first bytes came."""
        start = time.perf_counter()
        async with session.post(url=request.api_url) as response:
            async for _ in response.content.iter_any():
                times.append(time.perf_counter() - start)
                read.set()
        return SimpleNamespace(start_time=start, ttft=times[0], success=True, output_tokens=1)

    async def run() -> ResponseClock:
        clock = ResponseClock(send)
        async with server_of(chunks, read) as (url, session):
            await clock(request_func_input=SimpleNamespace(prompt=[1, 2], api_url=url), session=session)
        return clock

    ((prompt, seconds),) = asyncio.run(run()).seconds.items()
    assert prompt == (1, 2)
    assert len(times) == len(chunks)
    return None if math.isnan(seconds) else sum(arrived < seconds for arrived in times)


CUT = b"".join(stream("<|channel|>final<|message|>Yes"))
THOUGHT = ("<|channel|>", "analysis<|message|>hm", "<|end|><|start|>assistant<|channel|>final", "<|message|>", "Yes")


@pytest.mark.parametrize(
    ("chunks", "index"),
    [
        (stream(*THOUGHT), 4),  # 3 completes the marker, 4 has the first token after it
        ([CUT[:30], CUT[30:]], 1),  # a message in two pieces
        (stream("Yes", "no"), 0),  # without channels
        (stream("<|channel|>analysis<|message|>hm"), None),
        (stream("", ""), 0),
        (stream("<|channel|>final<|message|>", ""), None),
    ],
)
def test_the_final_channel_begins_after_its_marker(chunks, index):
    assert chunk_of_final(chunks) == index


def test_a_load_becomes_vllms_own_flags():
    assert load_flags(LoadConfig(concurrency=8)) == ["--max-concurrency", "8", "--request-rate", "inf"]
    burst = load_flags(LoadConfig(request_rate=64, burstiness=0.2, concurrency=32))
    assert burst == ["--max-concurrency", "32", "--request-rate", "64", "--burstiness", "0.2"]
    ramp = load_flags(LoadConfig(request_rate=8, ramp="linear", ramp_start=2))
    assert ramp[:6] == ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "2", "--ramp-up-end-rps", "8"]


def test_an_endpoint_that_does_not_answer_is_named():
    with pytest.raises(ServerError, match=r"endpoint gone: http://127.0.0.1:9 "):
        endpoint_server(EndpointConfig(name="gone", url="http://127.0.0.1:9", model="m"))


USAGE = b'data: {"usage": {"completion_tokens": 1, "prompt_tokens": 2}}\n\n'
DEAD = b'data: {"error": {"message": "engine dead"}}\n\n'


@pytest.mark.slow
@pytest.mark.parametrize(("end", "whole"), [((USAGE,), True), ((b"data: [DONE]\n\n",), False), ((DEAD,), False)])
def test_a_response_that_breaks_off_is_a_failure(end, whole):
    """vLLM's own client takes a response for whole once a token of it came."""
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput, async_request_openai_completions

    async def send() -> Any:
        async with server_of([*stream("Yes")[:-1], *end]) as (url, session):
            request = RequestFuncInput(prompt=[1, 2], api_url=url, prompt_len=2, output_len=4, model="m")
            return await ResponseClock(async_request_openai_completions)(request, session)

    output = asyncio.run(send())
    assert (output.success, not output.error) == (whole, whole)
