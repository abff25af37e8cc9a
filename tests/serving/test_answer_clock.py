"""A stream as a server sends it, cut where a network may cut it: the answer begins after the final channel's marker."""

import asyncio
import json
import math
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from drafthead.serving.answer_clock import AnswerClock


def _stream(*texts: str) -> list[bytes]:
    lines = [f"data: {json.dumps({'choices': [{'text': text}]})}\n\n".encode() for text in texts]
    return [*lines, b"data: [DONE]\n\n"]


def _ttfot(chunks: list[bytes], pause_before: int | None = None) -> tuple[float, float]:
    """(time to the answer, time to the first chunk) of one request; half a second passes before a chunk."""

    class Session:
        @asynccontextmanager
        async def post(self, **_options):
            async def arrive():
                for index, chunk in enumerate(chunks):
                    if index == pause_before:
                        await asyncio.sleep(0.5)
                    yield chunk

            yield SimpleNamespace(status=200, reason="OK", content=SimpleNamespace(iter_any=arrive))

    async def send(_request, session, _pbar):
        loop = asyncio.get_running_loop()
        start, first = loop.time(), None
        async with session.post() as response:
            async for _ in response.content.iter_any():
                first = first or loop.time() - start
        return SimpleNamespace(start_time=start, ttft=first, success=True, output_tokens=1)

    clock = AnswerClock(send)
    asyncio.run(clock(request_func_input=SimpleNamespace(prompt=[1, 2]), session=Session()))
    ((_, seconds),) = clock.seconds.items()
    return seconds, 0.5


def test_thinking_comes_before_the_answer():
    texts = ("<|channel|>", "analysis<|message|>hm", "<|end|><|start|>assistant<|channel|>final", "<|message|>", "Yes")
    seconds, pause = _ttfot(_stream(*texts), pause_before=4)  # the marker is there, the answer is not
    assert seconds >= pause


def test_a_message_may_arrive_in_pieces():
    whole = b"".join(_stream("<|channel|>final<|message|>Yes"))
    assert _ttfot([whole[:30], whole[30:]], pause_before=1)[0] >= 0.5


def test_without_channels_the_answer_is_the_first_token():
    assert _ttfot(_stream("Yes", "no"), pause_before=1)[0] < 0.5


def test_an_answer_that_never_comes_has_no_time():
    assert math.isnan(_ttfot(_stream("<|channel|>analysis<|message|>hm"))[0])


@pytest.mark.parametrize("text", ["", "<|channel|>final<|message|>"])
def test_nothing_is_no_answer(text):
    seconds, _ = _ttfot(_stream(text, ""))
    assert math.isnan(seconds) == bool(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        ([*_stream("said")[:-1], b'data: {"usage": {"completion_tokens": 1, "prompt_tokens": 2}}\n\n'], ""),
        (_stream("said"), "the stream ended without the server's count of tokens"),
        ([*_stream("said")[:-1], b'data: {"error": {"message": "engine dead"}}\n\n'], "the answer was cut short"),
    ],
)
def test_an_answer_that_broke_off_is_a_failure(chunks, error):
    """vLLM's own client takes an answer for whole once a token of it came."""
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncInput, async_request_openai_completions

    class Session:
        @asynccontextmanager
        async def post(self, **_options):
            async def arrive():
                for chunk in chunks:
                    yield chunk

            yield SimpleNamespace(status=200, reason="OK", content=SimpleNamespace(iter_any=arrive))

    request = RequestFuncInput(prompt=[1, 2], api_url="http://x/v1/completions", prompt_len=2, output_len=4, model="m")
    output = asyncio.run(AnswerClock(async_request_openai_completions)(request, Session()))
    assert output.success == (not error)
    assert error in output.error
    assert bool(output.error) == bool(error)
