"""Load on a server: requests sent as places become free or at a rate, and timed as their streams arrive.

Prompts go to /v1/completions as token ids, rendered by the target's own chat template: /v1/chat/completions would
render every gpt-oss model with the built-in o200k_harmony vocabulary, whatever tokenizer the model has. What this gives
up is the time the server spends in the chat template.

While a load runs, the engine's own count of running and waiting requests is sampled: more requests in flight than the
engine runs at once wait in its queue, which a client cannot see. The alternative, `vllm bench serve`, reads neither
that count nor Harmony's channels.
"""

import asyncio
import codecs
import json
import math
import os
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import numpy as np

from drafthead.config.evaluation import EndpointConfig, LoadConfig
from drafthead.engine.server import Server, ServerError, parse_metrics
from drafthead.files import reading_external
from drafthead.progress import progress_bar
from drafthead.statistics import Array

# Special tokens stay in the text, so that Harmony's channels can be told apart in it.
_PROMPT_OPTIONS = {"add_special_tokens": False, "skip_special_tokens": False}
_CHANNEL, _FINAL = "<|channel|>", "<|channel|>final<|message|>"  # Harmony
_SAMPLE_S = 0.2  # a page of metrics costs the server some milliseconds
_LONGEST_S = 6 * 3600.0
_IDLE_S = 1.0  # vLLM's server closes a connection after 5 s without a request; one sent just then would be lost
REACHED = 0.9  # of what was requested: below it the level is labelled, not compared


@dataclass(frozen=True)
class LoadRequest:
    """One prompt to send: its id, the token ids the server reads, HTTP headers beside those of every request, and its
    longest output where that is not the load's."""

    id: str
    prompt_ids: list[int]
    headers: dict[str, str] = field(default_factory=dict)
    max_tokens: int | None = None


@dataclass(frozen=True)
class RequestTimes:
    """What was measured of one request; times in seconds on one clock per level.

    Attributes:
        id: the prompt's id.
        error: empty when the request succeeded.
        prompt_tokens, output_tokens: numbers of tokens, as the server counted them.
        start_s: time of sending, counted from the first request of the level.
        ttft_s: time from sending to the first token of any channel.
        gaps_s: times between chunks; a chunk carries all tokens of one verification step.
        latency_s: time from sending to the last token.
        text: the output with its special tokens.
        ttfot_s: time from sending to the first token of the final channel, or of any where there are no channels;
            NaN where none came or it was not measured.
        accepted_by_step: draft tokens accepted at every verification step that had a draft, in order; empty where the
            server does not say.
    """

    id: str
    error: str
    prompt_tokens: int
    output_tokens: int
    start_s: float
    ttft_s: float
    gaps_s: list[float]
    latency_s: float
    text: str
    ttfot_s: float = math.nan
    accepted_by_step: list[int] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, float]:
        """Figures by column, in seconds: see evaluation/columns.yaml; NaN where an output of one token has no gap.

        A speculative step delivers several tokens in one chunk, so `itl_s` gets worse by design where `tpot_s` gets
        better: only `tpot_s` tells how fast text appears.
        """
        n = self.output_tokens
        return {
            "ttft_s": self.ttft_s,
            "e2e_s": self.latency_s,
            "tpot_s": (self.latency_s - self.ttft_s) / (n - 1) if n > 1 else math.nan,
            "itl_s": float(np.mean(self.gaps_s)) if self.gaps_s else math.nan,
            "tpot_all_s": self.latency_s / n if n else math.nan,
        }


class EngineSample(NamedTuple):
    """Requests that run in the engine and wait in its queue, at a time on the clock of `RequestTimes.start_s`."""

    at_s: float
    running: int
    waiting: int


@dataclass(frozen=True)
class LoadResult:
    """One level of load: every request in prompt order, and what the engine ran meanwhile."""

    requests: list[RequestTimes]
    samples: list[EngineSample]

    @property
    def good(self) -> list[RequestTimes]:
        """The requests that succeeded."""
        return [request for request in self.requests if not request.error]

    @property
    def duration_s(self) -> float:
        """From the first sending to the last response of those that succeeded; NaN where none did."""
        if not self.good:
            return math.nan
        return max(r.start_s + r.latency_s for r in self.good) - min(r.start_s for r in self.good)

    @property
    def in_engine(self) -> tuple[float, float]:
        """Requests that ran in the engine and that waited in its queue: medians while there were requests to send.

        A level whose requests are all sent at once has no such time: then the most that ran at a time. NaN without
        samples.
        """
        if not self.samples:
            return math.nan, math.nan
        sent = [r.start_s for r in self.requests]
        inside = [s for s in self.samples if min(sent) < s.at_s <= max(sent)]
        if not inside or all_at_once(sent, self.duration_s):
            return max((s.running, s.waiting) for s in self.samples)
        return float(np.median([s.running for s in inside])), float(np.median([s.waiting for s in inside]))

    @property
    def achieved(self) -> float:
        """Mean number of requests in flight while there were still requests to send, as the client saw it.

        Counted from the first sending to the last, because a level drains after that whatever the server does.
        Requests that are all sent at once never fill more than their own number of places.
        """
        if not self.good:
            return 0.0
        sent = np.array([r.start_s for r in self.good])
        ended = sent + np.array([r.latency_s for r in self.good])
        first, last = sent.min(), sent.max()
        if all_at_once(sent, ended.max() - first):
            return float(len(sent))
        return float((np.minimum(ended, last) - sent).sum() / (last - first))

    def reached(self, load: LoadConfig) -> bool:
        """Whether the level was the load it is named after.

        Places are reached when that many requests, less a tenth, were in flight without waiting in the engine's queue
        and as many ran in it, give or take one that is between two places. A rate is reached when sending took no more
        than a tenth longer than it should; with a cap as well, the level is reached when the cap was full instead.
        """
        running, waiting = self.in_engine
        served = self.achieved if math.isnan(running) else min(self.achieved - waiting, running + 1)
        full = load.concurrency is not None and served >= REACHED * load.concurrency
        if load.request_rate is None or full or len(self.good) < 2:
            return full
        return max(r.start_s for r in self.requests) * REACHED <= send_times(load, len(self.requests))[-1]

    def summary(self, load: LoadConfig) -> dict[str, Any]:
        """Figures of the level by column: see evaluation/columns.yaml."""
        running, waiting = self.in_engine
        output_tokens = sum(r.output_tokens for r in self.good)
        return {
            "requests": len(self.requests),
            "failed": len(self.requests) - len(self.good),
            "achieved": self.achieved,
            "running": running,
            "waiting": waiting,
            "reached": self.reached(load),
            "duration_s": self.duration_s,
            "output_tokens": output_tokens,
            "prompt_tokens": sum(r.prompt_tokens for r in self.good),
            "output_tokens_per_s": output_tokens / self.duration_s,
        }


def all_at_once(sent: Sequence[float] | Array, duration_s: float) -> bool:
    """Whether all were sent in one go: there is no time to average over."""
    return bool(np.ptp(sent) < 0.01 * duration_s)


def endpoint_server(endpoint: EndpointConfig) -> Server:
    """A server that was started elsewhere (SGLang, TensorRT-LLM, vLLM), after it has named the model.

    Raises:
        ServerError: it does not answer, refuses the key, serves other models, or is no such server.
    """
    where, variable = f"endpoint {endpoint.name}", endpoint.api_key_env
    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        raise ServerError(f"{where}: environment variable {variable} is not set")
    server = Server(endpoint.base_url, endpoint.model, key)
    with reading_external(
        f"{where} at {server.base_url}: its list of models", "Correct url or api_key_env", ServerError
    ):
        with server.client(30) as client:
            response = client.get("/v1/models").raise_for_status()
        served = [model["id"] for model in response.json()["data"]]
    if endpoint.model not in served:
        raise ServerError(f"{where} serves {', '.join(served)}, not {endpoint.model}: correct model")
    return server


def warm_up(server: Server, requests: Sequence[LoadRequest], max_tokens: int) -> None:
    """Send a few real prompts at once, so that lazy initialisation is not measured.

    Raises:
        ServerError: the server refuses one, or is gone.
    """
    prompts = [r.prompt_ids for r in requests]
    body = {"model": server.model, "prompt": prompts, "max_tokens": max_tokens, "temperature": 0}
    response = server.request("POST", "/v1/completions", 600, json=body | _PROMPT_OPTIONS)
    if response.is_error:
        raise ServerError(f"warm-up request answered {response.status_code}: {response.text[:300]}")


def run_load(
    server: Server,
    requests: Sequence[LoadRequest],
    *,
    load: LoadConfig,
    max_tokens: int,
    temperature: float = 0.0,
    ignore_eos: bool = False,
    title: str = "load",
) -> LoadResult:
    """Send every request once.

    Args:
        server: server that the requests are sent to.
        requests: requests in the order of sending; results come back in the same order.
        load: number of requests at a time, or their rate.
        max_tokens: longest output.
        temperature: 0 decodes greedily.
        ignore_eos: every output has max_tokens tokens.
        title: title of the progress bar.

    Raises:
        ServerError: the server ended.
    """
    options = {"model": server.model, "max_tokens": max_tokens, "temperature": temperature, "stream": True}
    options |= {"stream_options": {"include_usage": True}, **_PROMPT_OPTIONS}
    if ignore_eos:
        options["ignore_eos"] = True
    with progress_bar(len(requests), title, "request") as bar:
        return asyncio.run(_send_all(server, requests, load, options, bar))


def send_times(load: LoadConfig, count: int) -> Array:
    """Seconds after the start at which each of `count` requests is due, (count,); zeros where places alone decide.

    Gaps are gamma-distributed with shape `burstiness`, scaled so that their mean is 1 / rate (as vLLM's benchmark
    client does); every method gets the same draw.
    """
    if load.request_rate is None:
        return np.zeros(count)
    gaps = np.random.default_rng(count).gamma(load.burstiness, 1 / load.burstiness, count)
    return np.cumsum(gaps) * count / load.request_rate / gaps.sum()


async def _send_all(
    server: Server, requests: Sequence[LoadRequest], load: LoadConfig, options: dict[str, Any], bar: Any
) -> LoadResult:
    places = asyncio.Semaphore(load.concurrency or len(requests))
    samples: list[EngineSample] = []
    headers = {"Authorization": f"Bearer {server.api_key}"} if server.api_key else {}
    timeout = aiohttp.ClientTimeout(total=_LONGEST_S)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE_S)
    base_url = f"{server.base_url}/"  # paths without a leading slash stay below a prefix
    async with aiohttp.ClientSession(base_url, headers=headers, timeout=timeout, connector=connector) as session:
        begun = time.perf_counter()

        async def send(request: LoadRequest, due_s: float) -> RequestTimes:
            await asyncio.sleep(begun + due_s - time.perf_counter())
            async with places:
                times = await stream_request(session, request, options, begun)
            if times.error and server.how_it_ended():
                raise server.gone("in the middle of a load")
            bar.update()
            return times

        watching = asyncio.create_task(_watch(session, samples, begun))
        due = send_times(load, len(requests))
        try:
            times = await asyncio.gather(*(send(r, float(t)) for r, t in zip(requests, due, strict=True)))
        finally:
            watching.cancel()  # before the session is closed, under which it would fail
    return LoadResult(times, samples)


async def stream_request(
    session: aiohttp.ClientSession, request: LoadRequest, options: dict[str, Any], begun: float
) -> RequestTimes:
    """Send one request and time its chunks; what failed is in `error`.

    Args:
        session: HTTP session of the server.
        request: request to send.
        options: fields of the request's body other than the prompt.
        begun: start of the load, by time.perf_counter.
    """
    error = ""
    usage: dict[str, int] = {}
    drafts: dict[str, Any] = {}
    pieces: list[str] = []
    arrivals: list[float] = []
    sent = time.perf_counter()
    try:
        body = options | {"prompt": request.prompt_ids}
        body |= {"max_tokens": request.max_tokens} if request.max_tokens else {}
        async with session.post("v1/completions", json=body, headers=request.headers) as response:
            if not response.ok:
                error = f"{response.status} {response.reason}: {(await response.text())[:300]}"
            async for data in read_events(response.content.iter_any()):
                if data.strip() == "[DONE]":
                    continue
                now, chunk = time.perf_counter(), json.loads(data)
                if not isinstance(chunk, dict):
                    raise ValueError(f"an event that is no JSON object: {data[:100]}")
                usage = chunk.get("usage") or usage
                if isinstance(metrics := chunk.get("metrics"), dict):
                    drafts = metrics.get("speculative_decoding") or drafts
                error = str(chunk.get("error") or error)[:300]
                if chunk.get("choices"):
                    pieces.append(chunk["choices"][0].get("text") or "")
                    arrivals.append(now - sent)
    except (aiohttp.ClientError, TimeoutError, ValueError) as failure:  # an event that is no JSON
        error = f"{type(failure).__name__}: {failure}"
    if not error and not usage.get("completion_tokens"):
        # Also where the engine died behind the server: the stream then ends like any other.
        error = (
            "the stream ended without the server's count of tokens: the response was cut short, or the server does "
            "not support stream_options.include_usage"
        )
    return RequestTimes(
        id=request.id,
        error=error,
        prompt_tokens=usage.get("prompt_tokens", 0),
        output_tokens=usage.get("completion_tokens", 0),
        start_s=sent - begun,
        ttft_s=arrivals[0] if arrivals else 0.0,
        gaps_s=list(np.diff(arrivals)),
        latency_s=arrivals[-1] if arrivals else time.perf_counter() - sent,
        text="".join(pieces),
        ttfot_s=final_channel_s(pieces, arrivals),
        accepted_by_step=drafts.get("per_step_accepted") or [],
    )


async def read_events(chunks: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The data of each event of a stream of server-sent events that is not empty, as it becomes complete.

    By the standard (html.spec.whatwg.org, "Server-sent events"): lines end in LF, CR or CRLF, a byte order mark and the
    space after "data:" may be there or not, an event may have several lines of data, comments and other fields are
    passed over, and an event that no empty line ends is none.
    """
    decoder = codecs.getincrementaldecoder("utf-8-sig")("replace")
    rest, after_cr, lines_of_event = "", False, list[str]()
    async for chunk in chunks:
        if not (text := decoder.decode(chunk)):
            continue
        text, after_cr = text[after_cr and text[0] == "\n" :], text[-1] == "\r"  # the other half of a CRLF
        *lines, rest = re.split(r"\r\n|\r|\n", rest + text)
        for line in lines:
            name, _, value = line.partition(":")
            if name == "data":
                lines_of_event.append(value.removeprefix(" "))
            elif not line:
                if data := "\n".join(lines_of_event):
                    yield data
                lines_of_event = []


def final_channel_s(pieces: Sequence[str], arrivals: Sequence[float]) -> float:
    """When the first text of the final channel came; without channels the first text; NaN where it never came."""
    text = "".join(pieces)
    if _CHANNEL not in text:
        return arrivals[0] if arrivals else math.nan
    if _FINAL not in text:
        return math.nan
    so_far = np.cumsum([len(piece) for piece in pieces])
    index = int(np.searchsorted(so_far, text.index(_FINAL) + len(_FINAL), side="right"))
    return arrivals[index] if index < len(arrivals) else math.nan


async def _watch(session: aiohttp.ClientSession, samples: list[EngineSample], begun: float) -> None:
    """Sample the engine until cancelled; nothing where the server has no such counters."""
    while True:
        try:
            async with session.get("metrics") as response:
                page = await response.text()
        except aiohttp.ClientError:  # the requests say that the server is gone
            return
        counters = parse_metrics(page)
        if "vllm:num_requests_running" not in counters:
            return
        counts = (int(counters[f"vllm:num_requests_{which}"]) for which in ("running", "waiting"))
        samples.append(EngineSample(time.perf_counter() - begun, *counts))
        await asyncio.sleep(_SAMPLE_S)
