"""When the answer proper begins, for models that think first: the client's stream watched as it arrives.

vLLM's benchmark client times the first token of any channel. Harmony's answer begins after the marker of the final
channel, so the text of every chunk is looked at when it comes in. That costs the client a second parse of each chunk.
"""

import json
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

_CHANNEL, _ANSWER = "<|channel|>", "<|channel|>final<|message|>"  # Harmony


class AnswerClock:
    """Wraps one of the client's request functions.

    Attributes:
        seconds: prompt token ids -> from sending to the first token of the answer. Without channels that is the first
            token; NaN where the answer never came.
    """

    def __init__(self, send: Callable[..., Awaitable[Any]]):
        self.seconds: dict[tuple[int, ...], float] = {}
        self._send = send

    async def __call__(self, request_func_input: Any, session: Any, pbar: Any = None) -> Any:
        """Send one request, as the client does; the names are the client's."""
        watched = _WatchedSession(session)
        output = await self._send(request_func_input, watched, pbar)
        _own_up(output)
        self.seconds[tuple(request_func_input.prompt)] = watched.answered_after(output.start_time, output.ttft)
        return output


def _own_up(output: Any) -> None:
    """Call a failure one.

    The client takes an answer for whole once a token of it came. A stream that broke off, because the engine died
    behind the server, then passes for an answer of one token; what it lacks is the count of tokens that ends every
    stream.
    """
    if output.success and not output.output_tokens:
        output.success = False
        output.error = (
            "the stream ended without the server's count of tokens: the answer was cut short, or the server knows no "
            "stream_options.include_usage"
        )


class _WatchedSession:
    """An HTTP session that hands everything on and notes when the text passes the marker."""

    def __init__(self, session: Any):
        self._session = session
        self._pending = b""
        self._text = ""
        self._answered: float | None = None

    def answered_after(self, start: float, first_token_s: float) -> float:
        """Seconds from `start` to the answer."""
        if _CHANNEL not in self._text:
            return first_token_s
        return math.nan if self._answered is None else self._answered - start

    @asynccontextmanager
    async def post(self, **options: Any) -> AsyncIterator[SimpleNamespace]:
        async with self._session.post(**options) as response:
            content = SimpleNamespace(iter_any=lambda: self._watch(response.content))
            yield SimpleNamespace(status=response.status, reason=response.reason, content=content)

    async def _watch(self, content: Any) -> AsyncIterator[bytes]:
        async for chunk in content.iter_any():
            if self._answered is None:
                self._read(chunk, time.perf_counter())
            yield chunk

    def _read(self, chunk: bytes, now: float) -> None:
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data: ")
            if data.startswith(b"{"):
                self._text += "".join(choice.get("text") or "" for choice in json.loads(data).get("choices", ()))
        _, marker, answer = self._text.partition(_ANSWER)
        if marker and answer:
            self._answered = now
