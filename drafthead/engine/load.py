"""Load on a server, generated and timed by vLLM's own benchmark client (`vllm bench serve`).

The client runs inside this process: its import takes longer than a small level, and its command line needs
a `vllm` distribution that the CPU build lacks. `LoadResult.command` is the equivalent command. Prompts go
to /v1/completions as token ids, rendered by the target's own chat template: /v1/chat/completions would
render every gpt-oss model with the built-in o200k_harmony vocabulary, whatever tokenizer the model has,
and takes one message per prompt. What this gives up is the time the server spends in the chat template.

Only raw times are taken from the client; figures are computed by us, because its peak figures count
chunks instead of tokens.
"""

import argparse
import asyncio
import contextlib
import gc
import importlib
import json
import math
import os
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from drafthead.config.evaluation import LoadConfig
from drafthead.engine.answer_clock import AnswerClock
from drafthead.engine.server import Server, ServerError
from drafthead.engine.server_command import HOST
from drafthead.progress import progress_bar

_CLIENT, _BACKEND = "vllm.benchmarks.serve", "vllm"


@dataclass(frozen=True)
class LoadRequest:
    """One prompt to send: its id and the token ids the server reads."""

    id: str
    prompt_ids: list[int]


@dataclass(frozen=True)
class RequestTimes:
    """What the client saw of one request; times in seconds on one clock per level.

    Attributes:
        id: the prompt's id.
        error: empty when the request succeeded.
        prompt_tokens, output_tokens: as the server counted them.
        start_s: when it was sent, counted from the first request of the level.
        ttft_s: from sending to the first token of any channel.
        gaps_s: between chunks; a chunk carries all tokens of one verification step.
        latency_s: from sending to the last token.
        text: the output with its special tokens.
        ttfot_s: from sending to the first token of the answer proper; NaN where none came or nobody looked.
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
    answer = server.ask("POST", "/v1/completions", 600, json=body | _PROMPT_OPTIONS)
    if answer.is_error:
        raise ServerError(f"warm-up request answered {answer.status_code}: {answer.text[:300]}")


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
        *_where(server, prompts, len(requests)),
        *load_flags(load),
        *("--temperature", f"{temperature:g}"),
        # Without a tokenizer the client asks for one token unless told otherwise here.
        *("--extra-body", json.dumps(body)),
        *("--num-warmups", "0", "--ready-check-timeout-sec", "0"),  # warm_up does it with other prompts
        *("--save-result", "--save-detailed", "--result-dir", str(directory), "--result-filename", f"{label}.json"),
    ]
    with (directory / f"{label}.log").open("w") as log, progress_bar(len(requests), title, "request") as bar:
        answered = _run_client(flags, server, log, bar)
    raw = json.loads((directory / f"{label}.json").read_text())
    times = [
        replace(t, ttfot_s=answered.get(tuple(r.prompt_ids), math.nan))
        for t, r in zip(request_times([r.id for r in requests], raw), requests, strict=True)
    ]
    return LoadResult(raw["duration"], times, ["vllm", "bench", "serve", *flags])


# Special tokens stay in the text, so that Harmony's channels can be told apart in it.
_PROMPT_OPTIONS = {"add_special_tokens": False, "skip_special_tokens": False}


def load_flags(load: LoadConfig) -> list[str]:
    """The client's flags for a load."""
    flags = ["--max-concurrency", str(load.concurrency)] if load.concurrency else []
    if load.ramp:
        # The client takes whole rates for a ramp, and no other rate beside it.
        rates = [
            "--ramp-up-start-rps",
            str(round(load.ramp_start)),
            "--ramp-up-end-rps",
            str(round(load.request_rate or 0)),
        ]
        return [*flags, "--ramp-up-strategy", load.ramp, *rates, "--burstiness", f"{load.burstiness:g}"]
    if load.request_rate is None:
        return [*flags, "--request-rate", "inf"]
    return [*flags, "--request-rate", f"{load.request_rate:g}", "--burstiness", f"{load.burstiness:g}"]


def _where(server: Server, prompts: Path, count: int) -> list[str]:
    return [
        *("--backend", _BACKEND, "--base-url", server.base_url, "--endpoint", "/v1/completions"),
        *("--model", server.model, "--skip-tokenizer-init"),  # prompts are token ids already
        *("--dataset-name", "custom", "--dataset-path", str(prompts), "--num-prompts", str(count)),
        *("--no-oversample", "--disable-shuffle", "--skip-chat-template"),
    ]


def _run_client(flags: list[str], server: Server, log: Any, bar: Any) -> dict[tuple[int, ...], float]:
    """Run the client; returns when each prompt's answer began, see `AnswerClock`."""
    client: Any = importlib.import_module(_CLIENT)
    parser_class = importlib.import_module("vllm.utils.argparse_utils").FlexibleArgumentParser
    parser: argparse.ArgumentParser = parser_class(prog="vllm bench serve")
    client.add_cli_args(parser)
    environment = {"OPENAI_API_KEY": server.api_key or "none", "NO_PROXY": HOST, "no_proxy": HOST}
    clock = AnswerClock(_while_it_runs(server, client.ASYNC_REQUEST_FUNCS[_BACKEND]))
    with _environment(environment), contextlib.redirect_stdout(log), _equipped(client, bar, clock):
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
    """`send`, which gives up the load once the server has ended: the client would send what is left to nobody."""

    async def send_or_give_up(request: Any, session: Any, pbar: Any = None) -> Any:
        output = await send(request, session, pbar)
        if not output.success and server.how_it_ended():
            raise server.gone("in the middle of a load")
        return output

    return send_or_give_up


@contextlib.contextmanager
def _equipped(client: Any, bar: Any, clock: AnswerClock) -> Iterator[None]:
    """Our bar and our clock instead of the client's."""
    functions = client.ASYNC_REQUEST_FUNCS
    drawn, sent = client.tqdm, functions[_BACKEND]
    client.tqdm, functions[_BACKEND] = (lambda *_args, **_options: bar), clock
    try:
        yield
    finally:
        client.tqdm, functions[_BACKEND] = drawn, sent


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


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
