"""The server of a loop, from outside: start or find it, ask which head drafts, load another one, send requests."""

import json
import logging
import secrets
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from drafthead.adapting.capture import capture_key
from drafthead.adapting.endpoint import FLAGS, KEY, ROUTE, SETTINGS
from drafthead.artifacts import read_json
from drafthead.config import Recipe
from drafthead.config.evaluation import LoadConfig
from drafthead.data.prompts import Prompt, split_turns
from drafthead.data.rendering import renderer
from drafthead.drafters.registry import drafter_of
from drafthead.engine.load import LoadRequest, LoadResult, run_load
from drafthead.engine.server import Server, ServerError, running_server
from drafthead.files import write_json
from drafthead.generation.sources import read, read_row
from drafthead.target.tokenizer import load_tokenizer

_LOG = logging.getLogger(__name__)


def folder(recipe: Recipe) -> Path:
    """Where the loop's own files lie."""
    return recipe.directory("adapt", recipe.name)


@dataclass(frozen=True)
class Control:
    """A server that this project's middleware is in, and the key to it."""

    server: Server
    key: str

    def head(self) -> str | None:
        """The directory of the head that drafts; None when the server does not answer, or is another service."""
        try:
            response = self._request("GET")
            return response.json()["head"] if response.is_success else None
        except (ServerError, ValueError, LookupError, TypeError):
            return None

    def load(self, head: Path) -> None:
        """See that a head drafts, by swapping it in if another one does.

        Raises:
            ValueError: the server refuses, or is gone.
        """
        if self.head() == str(head):
            return
        response = self._request("POST", json={"head": str(head)})
        if not response.is_success:
            raise ValueError(f"{head} was not swapped in: {response.text[:500]}")

    @classmethod
    def running(cls, recipe: Recipe) -> "Control | None":
        """The server that another process of the loop has started; None where none answers."""
        path = folder(recipe) / "server.json"
        if not path.exists():
            return None
        record = read_json(path)
        control = cls(Server(record["url"], recipe.name, record["api_key"]), record["key"])
        return control if control.head() else None

    def _request(self, method: str, **options: Any) -> httpx.Response:
        return self.server.request(method, ROUTE, headers={"Authorization": f"Bearer {self.key}"}, **options)


@contextmanager
def serving(recipe: Recipe, head: Path) -> Iterator[Control]:
    """The server that another process of the loop has started, or one of our own with a head, while the block runs.

    Raises:
        CaptureError: the environment holds no key where it should.
        ServerError: our own does not start.
    """
    if control := Control.running(recipe):
        yield control
        return
    capture_key()  # the server would refuse it after it has loaded its weights
    path, key = folder(recipe) / "server.json", secrets.token_urlsafe(24)
    speculative = drafter_of(recipe.head).vllm.speculative_config(str(head), recipe.eval.num_draft_tokens)
    values = {"directory": str(folder(recipe)), "head": str(head), "settings": recipe.adapt.model_dump(mode="json")}
    # The key of captured text is inherited. vLLM's development routes would swap a head without our key.
    environment = {SETTINGS: json.dumps(values), KEY: key, "VLLM_SERVER_DEV_MODE": "0"}
    with running_server(
        recipe, folder(recipe) / "server.log", speculative=speculative, extra_args=FLAGS, environment=environment
    ) as server:
        write_json(path, {"url": server.base_url, "api_key": server.api_key, "key": key})
        try:
            yield Control(server, key)
        finally:
            path.unlink(missing_ok=True)


def read_traffic(recipe: Recipe, path: Path) -> list[LoadRequest]:
    """The prompts of a file in its order, each up to its last question.

    Every request consents to be captured and names its category as its workload; its reasoning effort is the first of
    the recipe's responses section.

    Raises:
        ValueError: a row is no prompt, the chat template refuses it, or there is none.
    """
    render, effort = renderer(recipe, load_tokenizer(recipe)), next(iter(recipe.responses.efforts))
    requests, repairs = [], Counter[str]()
    for where, data in read(path):
        try:
            row = read_row(data, "")
            repairs.update(set(row.repairs))
            messages = split_turns(row.messages, "last")[0][0] if row.messages else ()
            prompt = Prompt(where, path.stem, row.category or "all", messages, row.prompt_ids, row.tools)
            token_ids = render(prompt, effort)
        except ValueError as error:
            raise ValueError(f"{where}: {error}; correct or remove it") from error
        headers = {"X-Drafthead-Workload": prompt.category, "X-Drafthead-Capture": "yes"}
        requests.append(LoadRequest(where, token_ids, headers))
    if not requests:
        raise ValueError(f"{path} has no prompt to send")
    for repair, count in repairs.items():
        _LOG.info(f"{path}: in {count} of {len(requests)} rows {repair}")
    return requests


def send_traffic(
    recipe: Recipe, server: Server, requests: Sequence[LoadRequest], load: LoadConfig
) -> "Future[LoadResult]":
    """Send requests from a thread of its own.

    For a loop without clients of its own: what tests and the embedded target use. Temperature and length are the first
    of the recipe's responses section.
    """
    settings = recipe.responses
    temperature = next(iter(settings.temperatures))
    return ThreadPoolExecutor(1).submit(
        run_load, server, requests, load=load, max_tokens=settings.max_tokens, temperature=temperature, title="traffic"
    )
