"""A stream from a server, cut where a network may cut it: the answer begins after the final channel's marker."""

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

from drafthead.engine.answer_clock import AnswerClock


def stream(*texts: str) -> list[bytes]:
    lines = [f"data: {json.dumps({'choices': [{'text': text}]})}\n\n".encode() for text in texts]
    return [*lines, b"data: [DONE]\n\n"]


@asynccontextmanager
async def server_of(chunks: list[bytes], read: asyncio.Event | None = None) -> AsyncIterator[tuple[str, ClientSession]]:
    """A server that answers with these chunks, and waits for `read` after each; its URL and a session to ask it."""

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


def answered_with(chunks: list[bytes]) -> int | None:
    """Which of these chunks, sent one by one, the answer came with; None where it has no time.

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

    async def run() -> AnswerClock:
        clock = AnswerClock(send)
        async with server_of(chunks, read) as (url, session):
            await clock(request_func_input=SimpleNamespace(prompt=[1, 2], api_url=url), session=session)
        return clock

    ((prompt, seconds),) = asyncio.run(run()).seconds.items()
    assert prompt == (1, 2)
    assert len(times) == len(chunks)
    return None if math.isnan(seconds) else sum(arrived < seconds for arrived in times)


def test_thinking_comes_before_the_answer():
    texts = ("<|channel|>", "analysis<|message|>hm", "<|end|><|start|>assistant<|channel|>final", "<|message|>", "Yes")
    assert answered_with(stream(*texts)) == 4  # 3 has the marker, 4 the answer


def test_a_message_may_arrive_in_pieces():
    whole = b"".join(stream("<|channel|>final<|message|>Yes"))
    assert answered_with([whole[:30], whole[30:]]) == 1


def test_without_channels_the_answer_is_the_first_token():
    assert answered_with(stream("Yes", "no")) == 0


def test_an_answer_that_never_comes_has_no_time():
    assert answered_with(stream("<|channel|>analysis<|message|>hm")) is None


@pytest.mark.parametrize(("text", "chunk"), [("", 0), ("<|channel|>final<|message|>", None)])
def test_an_empty_answer_has_no_time_where_there_are_channels(text, chunk):
    assert answered_with(stream(text, "")) == chunk


USAGE = b'data: {"usage": {"completion_tokens": 1, "prompt_tokens": 2}}\n\n'
DEAD = b'data: {"error": {"message": "engine dead"}}\n\n'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        ([*stream("said")[:-1], USAGE], ""),
        (stream("said"), "the stream ended without the server's count of tokens"),
        ([*stream("said")[:-1], DEAD], "the answer was cut short"),
    ],
)
def test_an_answer_that_broke_off_is_a_failure(chunks, error):
    """vLLM's own client takes an answer for whole once a token of it came."""
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput, async_request_openai_completions

    async def ask() -> Any:
        async with server_of(chunks) as (url, session):
            request = RequestFuncInput(prompt=[1, 2], api_url=url, prompt_len=2, output_len=4, model="m")
            return await AnswerClock(async_request_openai_completions)(request, session)

    output = asyncio.run(ask())
    assert output.success == (not error)
    assert error in output.error
    assert bool(output.error) == bool(error)
