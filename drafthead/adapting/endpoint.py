"""Inside the server: what is written down of each request, and the call that puts another head into the engine.

vLLM's own flags load both, so that any `vllm serve` can have them:

    --middleware drafthead.adapting.endpoint.Adapting
    --worker-extension-cls drafthead.adapting.endpoint.DraftSwap
    --per-request-spec-decode-metrics detailed

A request may carry `X-Drafthead-Workload: NAME`, by which acceptance is reported, and `X-Drafthead-Capture: yes` or
`no`, which is its consent. `/adapt` answers on loopback only, to the key in DRAFTHEAD_ADAPT_KEY, whatever key the
API has: GET says which head drafts, POST {"head": DIRECTORY} puts another one in its place, between
two steps of the engine; requests go on. Drafts never decide what is said, only how many tokens a step yields, so keys
and values that the old head left in the cache cost acceptance of the requests that read them, until those end.

Capture takes tokens, not hidden states: `extract_hidden_states` is itself a speculative method, and vLLM runs one at a
time. An idle engine harvests the states later, which costs one prefill of the captured tokens.
"""

import hmac
import json
import logging
import math
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drafthead.adapting.capture import REST, Log, capture_key, redaction
from drafthead.config.evaluation import ALL
from drafthead.config.recipe import AdaptConfig

log = logging.getLogger(__name__)
SETTINGS, KEY = "DRAFTHEAD_ADAPT", "DRAFTHEAD_ADAPT_KEY"  # in the environment, as `control.serving` writes them
ROUTE = "/adapt"
MIXED = ""  # instead of a head: the request was answered with two
_LOOPBACK = ("127.0.0.1", "::1")
_TAKEN = ("", ALL, REST)  # what reports call more than one workload
_PURGE_S, _MOST_COUNTS = 60, 64 << 20  # seconds; bytes, of half a million requests


@dataclass(frozen=True)
class Client:
    """What a request says of itself."""

    workload: str = "unnamed"
    consent: bool | None = None


_CLIENT: ContextVar[Client] = ContextVar("client")


def client_of(headers: list[tuple[bytes, bytes]]) -> Client:
    """Workload and consent, from the headers of a request."""
    values = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}
    consent = {"yes": True, "no": False}.get(values.get("x-drafthead-capture", "").lower())
    workload = values.get("x-drafthead-workload", "")[:64]
    return Client("unnamed" if workload in _TAKEN else workload, consent)


FLAGS = (
    *("--middleware", "drafthead.adapting.endpoint.Adapting"),
    *("--worker-extension-cls", "drafthead.adapting.endpoint.DraftSwap"),
    *("--per-request-spec-decode-metrics", "detailed"),
)


class Recorder:
    """Writes down requests.

    Attributes:
        head: directory of the head that drafts now.
        swaps: number of swaps since the server started.
    """

    def __init__(self, settings: AdaptConfig, directory: Path, head: str) -> None:
        self.head, self.swaps = head, 0
        self._settings, self._redact = settings, redaction(settings.redact)
        self._counts, self._captured = Log(directory / "counts"), Log(directory / "captured", capture_key())
        self._purged = 0.0

    def swapped(self, head: str) -> None:
        """Another head drafts from now on."""
        self.head, self.swaps = head, self.swaps + 1

    async def watch(self, outputs: AsyncIterator[Any], delta: bool) -> AsyncIterator[Any]:
        """The outputs of a request as they come; the last one is written down before it is passed on."""
        client, head, swaps = _CLIENT.get(Client()), self.head, self.swaps
        prompt: list[int] | None = None
        response: list[int] = []
        async for output in outputs:
            completion = output.outputs[0]
            prompt = output.prompt_token_ids or prompt
            if not delta:
                response = []
            response += completion.token_ids
            if output.finished and prompt:
                head = head if swaps == self.swaps else MIXED  # also where the first one is back
                try:
                    self._write(client, head, prompt, response, completion.spec_decode_metrics)
                except Exception as error:  # no request fails because it could not be written down
                    log.warning(f"a request was not written down: {type(error).__name__}")
                completion.spec_decode_metrics = None  # the client gets what it would get without
            yield output

    def _write(self, client: Client, head: str, prompt: list[int], response: list[int], metrics: Any) -> None:
        drafted, accepted = (metrics.per_step_drafted, metrics.per_step_accepted) if metrics else ([], [])
        record = {
            "at": time.time(), "workload": client.workload, "head": head,
            "prompt_tokens": len(prompt), "response_tokens": len(response),
            "drafts": sum(n > 0 for n in drafted), "proposed": sum(drafted), "accepted": sum(accepted),
        }  # fmt: skip
        self._counts.append(record)
        consents = self._settings.consent == "given" if client.consent is None else client.consent
        sampled = response and consents and random.random() < self._settings.rate
        if sampled and (redacted := self._redact(prompt, response)) is not None:
            record |= {"prompt_ids": [int(i) for i in redacted[0]], "response_ids": [int(i) for i in redacted[1]]}
            if record["response_ids"] == response:  # accepted drafts by step are no use beside a changed response
                record["steps"] = accepted
            self._captured.append(record)
        if time.monotonic() - self._purged > _PURGE_S:
            self._purged = time.monotonic()
            self._captured.purge(self._settings.retention_days)
            self._counts.purge(math.inf, _MOST_COUNTS)  # the reference is in the loop's state


class Adapting:
    """Middleware of vLLM's API server."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app
        values = json.loads(os.environ[SETTINGS])
        settings = AdaptConfig.model_validate(values["settings"])
        self._recorder = Recorder(settings, Path(values["directory"]), values["head"])
        self._watched: Any = None

    async def __call__(self, scope: dict[str, Any], receive: Callable[..., Any], send: Callable[..., Any]) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        engine = scope["app"].state.engine_client
        if scope["path"] == ROUTE:
            return await (await self._control(scope, receive, engine))(scope, receive, send)
        if self._watched is not engine:
            self._watched, engine.generate = engine, self._watching(engine.generate)
        _CLIENT.set(client_of(scope["headers"]))  # uvicorn runs every request in a task of its own
        return await self._app(scope, receive, send)

    def _watching(self, generate: Callable[..., Any]) -> Callable[..., AsyncIterator[Any]]:
        from vllm.sampling_params import RequestOutputKind

        async def watched(prompt: Any, sampling_params: Any, *more: Any, **options: Any) -> AsyncIterator[Any]:
            delta = sampling_params.output_kind == RequestOutputKind.DELTA
            async with aclosing(generate(prompt, sampling_params, *more, **options)) as outputs:
                one = sampling_params.n == 1  # vLLM has no counters of each of several
                async for output in self._recorder.watch(outputs, delta) if one else outputs:
                    yield output

        return watched

    async def _control(self, scope: dict[str, Any], receive: Callable[..., Any], engine: Any) -> Callable[..., Any]:
        from starlette.requests import Request
        from starlette.responses import JSONResponse

        request = Request(scope, receive)
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if scope["client"][0] not in _LOOPBACK or not hmac.compare_digest(token.encode(), os.environ[KEY].encode()):
            return JSONResponse({"error": "not allowed"}, 401)
        if request.method == "POST":
            head = str((await request.json())["head"])
            try:
                await engine.collective_rpc("swap_draft", args=(head,))
            except Exception as error:  # whatever the engine says: the old head goes on
                return JSONResponse({"error": f"{type(error).__name__}: {error}"}, 409)
            self._recorder.swapped(head)
        return JSONResponse({"head": self._recorder.head})


class DraftSwap:
    """Extends vLLM's worker by a call for `collective_rpc`.

    The calls are those on which vLLM's start_draft_weight_update and finish_weight_update stand (0.32,
    vllm/distributed/weight_transfer), with a file in the place of a trainer that sends.
    """

    def swap_draft(self, head: str) -> None:
        """Load the weights of the head in a directory into the running draft model.

        Raises:
            ValueError: they are not those of the head that was loaded at the start: names, shapes or config differ.
        """
        import torch
        from safetensors.torch import load_file
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        worker: Any = self
        speculative = worker.vllm_config.speculative_config
        first = Path(speculative.model)
        check_alike(first, Path(head))
        model = worker.get_draft_model()
        weights = load_file(Path(head) / "model.safetensors")
        of_target = {id(parameter) for parameter in worker.get_model().parameters()}
        shared = [name for name, parameter in model.named_parameters() if id(parameter) in of_target]
        if taken := [name for name in weights if any(parameter.endswith(name) for parameter in shared)]:
            raise ValueError(f"{head} has {taken[0]}, which the running draft shares with its target")
        with torch.no_grad(), set_current_vllm_config(worker.vllm_config):
            initialize_layerwise_reload(model)
            try:
                model.load_weights(weights.items())
            finally:
                finalize_layerwise_reload(model, speculative.draft_model_config)


def check_alike(first: Path, other: Path) -> None:
    """See that a head fits into the place of another: the same config.json, and tensors of the same names and shapes.

    Raises:
        ValueError: naming what differs; the weights are not read.
    """
    from safetensors import safe_open

    def read(path: Path) -> dict[str, dict[str, Any]]:
        with safe_open(path / "model.safetensors", framework="pt") as file:
            shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        return {"config.json": json.loads((path / "config.json").read_text()), "shapes": shapes}

    theirs = read(other)
    for what, ours in read(first).items():
        if names := sorted(n for n in {*ours, *theirs[what]} if ours.get(n) != theirs[what].get(n)):
            raise ValueError(f"{other} is another head than {first}: {what} differ in {', '.join(names[:5])}")
