"""Load on a server, generated and timed by vLLM's own benchmark client (`vllm bench serve`).

The client runs inside this process: its import takes longer than a small level, and its command line needs a `vllm`
distribution that the CPU build lacks. `LoadResult.command` is the equivalent command. Prompts go to /v1/completions as
token ids, rendered by the target's own chat template: /v1/chat/completions would render every gpt-oss model with the
built-in o200k_harmony vocabulary, whatever tokenizer the model has, and takes one message per prompt. What this gives
up is the time the server spends in the chat template.

Only raw times are taken from the client; figures are computed by us, because its peak figures count chunks instead of
tokens. Its time of the first token is that of any channel; for models that think first, `ResponseClock` finds the
first token of the final channel, which costs the client a second parse of each chunk.
"""

import argparse
import asyncio
import gc
import importlib
import json
import math
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import httpx

from drafthead.config.evaluation import EndpointConfig, LoadConfig
from drafthead.engine.server import HOST, Server, ServerError
from drafthead.progress import progress_bar

_CLIENT, _BACKEND = "vllm.benchmarks.serve", "vllm"
# Special tokens stay in the text, so that Harmony's channels can be told apart in it.
_PROMPT_OPTIONS = {"add_special_tokens": False, "skip_special_tokens": False}
_CHANNEL, _FINAL = "<|channel|>", "<|channel|>final<|message|>"  # Harmony


@dataclass(frozen=True)
class LoadRequest:
    """One prompt to send: its id and the token ids the server reads."""

    id: str
    prompt_ids: list[int]


@dataclass(frozen=True)
class RequestTimes:
    """What the client measured of one request; times in seconds on one clock per level.

    Attributes:
        id: the prompt's id.
        error: empty when the request succeeded.
        prompt_tokens, output_tokens: as the server counted them.
        start_s: when it was sent, counted from the first request of the level.
        ttft_s: from sending to the first token of any channel.
        gaps_s: between chunks; a chunk carries all tokens of one verification step.
        latency_s: from sending to the last token.
        text: the output with its special tokens.
        ttfot_s: from sending to the first token of the final channel; NaN where none came or it was not measured.
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


@dataclass(frozen=True)
class LoadResult:
    """One level of load: wall time in seconds, every request in prompt order, and how to run it again."""

    duration_s: float
    requests: list[RequestTimes]
    command: list[str]


def endpoint_server(endpoint: EndpointConfig) -> Server:
    """A server that was started elsewhere (SGLang, TensorRT-LLM, vLLM), after it has named the model.

    Raises:
        ServerError: it does not answer, refuses the key, or serves other models.
    """
    where, variable = f"endpoint {endpoint.name}", endpoint.api_key_env
    key = os.environ.get(variable, "") if variable else ""
    if variable and not key:
        raise ServerError(f"{where}: environment variable {variable} is not set")
    url = endpoint.url.rstrip("/")
    server = Server(url, endpoint.model, key, None, (), 0.0, managed=False)
    try:
        with server.client(30) as client:
            response = client.get("/v1/models")
    except httpx.TransportError as error:
        raise ServerError(f"{where}: {url} does not answer ({error}); start it, or correct url") from error
    if response.is_error:
        raise ServerError(f"{where}: {url}/v1/models answered {response.status_code}; see api_key_env")
    served = [model["id"] for model in response.json()["data"]]
    if endpoint.model not in served:
        raise ServerError(f"{where} serves {', '.join(served)}, not {endpoint.model}: correct model")
    return server


def preload() -> None:
    """Import the client, which takes several seconds; worth doing while a server starts."""
    importlib.import_module(_CLIENT)


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
    directory: Path,
    *,
    load: LoadConfig,
    max_tokens: int,
    label: str,
    temperature: float = 0.0,
    ignore_eos: bool = False,
    title: str = "load",
) -> LoadResult:
    """Send every request once.

    Args:
        server: where to.
        requests: in the order of sending; results come back in the same order.
        directory: for the prompt file, the client's result and its log.
        load: how many at a time, or at what rate.
        max_tokens: longest output.
        label: names the files.
        temperature: 0 decodes greedily.
        ignore_eos: every output has max_tokens tokens.
        title: of the progress bar.

    Raises:
        ServerError: the server ended, the client failed or returned another number of requests.
    """
    directory.mkdir(parents=True, exist_ok=True)
    prompts = directory / f"{label}.prompts.jsonl"
    with prompts.open("w") as file:
        file.writelines(json.dumps({"prompt": r.prompt_ids}) + "\n" for r in requests)
    body = {"max_tokens": max_tokens, **_PROMPT_OPTIONS} | ({"ignore_eos": True} if ignore_eos else {})
    flags = [
        *("--backend", _BACKEND, "--base-url", server.base_url, "--endpoint", "/v1/completions"),
        *("--model", server.model, "--skip-tokenizer-init"),  # prompts are token ids already
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--num-prompts", str(len(requests))),
        *("--no-oversample", "--disable-shuffle", "--skip-chat-template"),
        *load_flags(load),
        *("--temperature", f"{temperature:g}"),
        # Without a tokenizer the client requests one token unless told otherwise here.
        *("--extra-body", json.dumps(body)),
        *("--num-warmups", "0", "--ready-check-timeout-sec", "0"),  # warm_up does it with other prompts
        *("--save-result", "--save-detailed", "--result-dir", str(directory), "--result-filename", f"{label}.json"),
    ]
    with (directory / f"{label}.log").open("w") as log, progress_bar(len(requests), title, "request") as bar:
        ttfot_s = _run_client(flags, server, log, bar)
    raw = json.loads((directory / f"{label}.json").read_text())
    times = [
        replace(t, ttfot_s=ttfot_s.get(tuple(r.prompt_ids), math.nan))
        for t, r in zip(request_times([r.id for r in requests], raw), requests, strict=True)
    ]
    return LoadResult(raw["duration"], times, ["vllm", "bench", "serve", *flags])


def load_flags(load: LoadConfig) -> list[str]:
    """The client's flags for a load."""
    flags = ["--max-concurrency", str(load.concurrency)] if load.concurrency else []
    if load.ramp:
        # The client takes whole rates for a ramp, and no other rate beside it.
        flags += ["--ramp-up-strategy", load.ramp, "--ramp-up-start-rps", str(round(load.ramp_start))]
        flags += ["--ramp-up-end-rps", str(round(load.request_rate or 0))]
    elif load.request_rate is None:
        return [*flags, "--request-rate", "inf"]
    else:
        flags += ["--request-rate", f"{load.request_rate:g}"]
    return [*flags, "--burstiness", f"{load.burstiness:g}"]


def _run_client(flags: list[str], server: Server, log: Any, bar: Any) -> dict[tuple[int, ...], float]:
    """Run the client with our bar and our clock; returns `ResponseClock.seconds`."""
    client: Any = importlib.import_module(_CLIENT)
    parser_class = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    parser: argparse.ArgumentParser = parser_class(prog="vllm bench serve")
    client.add_cli_args(parser)
    environment = {"OPENAI_API_KEY": server.api_key or "none", "NO_PROXY": HOST, "no_proxy": HOST}
    functions = client.ASYNC_REQUEST_FUNCS
    clock = ResponseClock(_while_it_runs(server, functions[_BACKEND]))
    with (
        mock.patch.dict(os.environ, environment),  # the client has no parameters for these three
        mock.patch.dict(functions, {_BACKEND: clock}),
        mock.patch.object(client, "tqdm", return_value=bar),
        redirect_stdout(log),
    ):
        try:
            asyncio.run(client.main_async(parser.parse_args(flags)))
        except ServerError:
            raise
        except Exception as error:
            raise ServerError(f"vLLM's benchmark client failed: {error}; its log: {log.name}") from error
        finally:
            # The client puts all objects there are out of the collector's reach. Left there, they outlive the
            # interpreter, and Triton lists hundreds of them as leaked when this process ends.
            gc.unfreeze()
    return clock.seconds


def _while_it_runs(server: Server, send: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """`send`, which ends the load once the server has ended: the client would go on sending."""

    async def send_or_give_up(request: Any, session: Any, pbar: Any = None) -> Any:
        output = await send(request, session, pbar)
        if not output.success and server.how_it_ended():
            raise server.gone("in the middle of a load")
        return output

    return send_or_give_up


class ResponseClock:
    """Wraps one of the client's request functions and watches the stream as it arrives.

    Attributes:
        seconds: prompt token ids -> from sending to the first token of the final channel. Without channels that is
            the first token; NaN where the final channel never came.
    """

    def __init__(self, send: Callable[..., Awaitable[Any]]):
        self.seconds: dict[tuple[int, ...], float] = {}
        self._send = send

    async def __call__(self, request_func_input: Any, session: Any, pbar: Any = None) -> Any:
        """Send one request, as the client does; the names are the client's."""
        stream = _WatchedSession(session)
        output = await self._send(request_func_input, stream, pbar)
        if output.success and not output.output_tokens:
            # The client takes a response for whole once a token of it came, also when the engine died behind the
            # server and the stream broke off; what is missing then is the count of tokens that ends every stream.
            output.success = False
            output.error = (
                "the stream ended without the server's count of tokens: the response was cut short, or the server "
                "does not support stream_options.include_usage"
            )
        seconds = math.nan if stream.final_at is None else stream.final_at - output.start_time
        self.seconds[tuple(request_func_input.prompt)] = seconds if _CHANNEL in stream.text else output.ttft
        return output


class _WatchedSession:
    """An HTTP session that hands everything on and notes when the text passes the marker of the final channel."""

    def __init__(self, session: Any):
        self.text = ""
        self.final_at: float | None = None
        self._session = session
        self._pending = b""

    @asynccontextmanager
    async def post(self, **options: Any) -> AsyncIterator[SimpleNamespace]:
        async with self._session.post(**options) as response:
            content = SimpleNamespace(iter_any=lambda: self._watch(response.content))
            yield SimpleNamespace(status=response.status, reason=response.reason, content=content)

    async def _watch(self, content: Any) -> AsyncIterator[bytes]:
        async for chunk in content.iter_any():
            if self.final_at is None:
                self._read(chunk, time.perf_counter())
            yield chunk

    def _read(self, chunk: bytes, now: float) -> None:
        *lines, self._pending = (self._pending + chunk).split(b"\n")
        for line in lines:
            data = line.strip().removeprefix(b"data: ")
            if data.startswith(b"{"):
                self.text += "".join(choice.get("text") or "" for choice in json.loads(data).get("choices", ()))
        if self.text.partition(_FINAL)[2]:
            self.final_at = now


def request_times(ids: Sequence[str], raw: dict[str, Any]) -> list[RequestTimes]:
    """The requests of a result that the client wrote with --save-detailed, in the order of sending.

    Raises:
        ServerError: it holds another number of requests than `ids`.
    """
    if len(raw["start_times"]) != len(ids):
        raise ServerError(f"{len(ids)} requests were sent but {len(raw['start_times'])} came back")
    first = min(raw["start_times"])
    return [
        RequestTimes(
            id=name,
            # The client's reason is the status line's, which may be empty; a request without tokens failed.
            error=raw["errors"][i] or ("" if raw["output_lens"][i] else "refused without a reason"),
            prompt_tokens=raw["input_lens"][i],
            output_tokens=raw["output_lens"][i],
            start_s=raw["start_times"][i] - first,
            ttft_s=raw["ttfts"][i],
            gaps_s=raw["itls"][i],
            latency_s=raw["latencies"][i] if "latencies" in raw else raw["ttfts"][i] + sum(raw["itls"][i]),
            text=raw["generated_texts"][i],
        )
        for i, name in enumerate(ids)
    ]
