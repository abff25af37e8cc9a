"""Requests from a file of prompts, for a loop without clients of its own: what tests and the embedded target use."""

import logging
import random
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx

from drafthead.config import Recipe
from drafthead.data.prompts import Prompt
from drafthead.data.rendering import renderer
from drafthead.engine.server import Server
from drafthead.generation.source_files import read
from drafthead.generation.sources import LOCAL, read_row
from drafthead.target.tokenizer import load_tokenizer

log = logging.getLogger(__name__)
_PLACES = 16  # requests in flight; above that, later ones are sent late


class Traffic:
    """Sends the prompts of a file in its order, from a thread of its own.

    Every request consents to be captured and names its category as its workload; temperature and length are those of
    the recipe's responses section, drawn for each as there.
    """

    def __init__(self, recipe: Recipe, server: Server, path: Path, rate: float) -> None:
        render = renderer(recipe, load_tokenizer(recipe))
        rows = [read_row(row, LOCAL) for _, row in read(path)]
        draw, settings = random.Random(recipe.responses.seed), recipe.responses
        self._sent = []
        for row in rows:
            prompt = Prompt("", path.stem, row.category or "all", row.messages, row.prompt_ids, row.tools)
            (effort,) = draw.choices(list(settings.efforts), list(settings.efforts.values()))
            (temperature,) = draw.choices(list(settings.temperatures), list(settings.temperatures.values()))
            self._sent.append((prompt.category, render(prompt, effort), temperature))
        self._server, self._rate, self._tokens = server, rate, settings.max_tokens
        self.answered, self.errors = 0, 0
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def ended(self) -> bool:
        """Whether every request was answered, or failed."""
        return not self._thread.is_alive()

    def _send(self) -> None:
        begun = time.monotonic()
        with self._server.client() as client, ThreadPoolExecutor(_PLACES) as places:
            for i, (workload, ids, temperature) in enumerate(self._sent):
                time.sleep(max(0.0, begun + i / self._rate - time.monotonic()))
                future = places.submit(self._ask, client, workload, ids, temperature)
                future.add_done_callback(self._count)

    def _ask(self, client: httpx.Client, workload: str, ids: list[int], temperature: float) -> None:
        body = {"model": self._server.model, "prompt": ids, "max_tokens": self._tokens, "temperature": temperature}
        headers = {"X-Drafthead-Workload": workload, "X-Drafthead-Capture": "yes"}
        client.post("/v1/completions", json=body, headers=headers).raise_for_status()

    def _count(self, future: Future[None]) -> None:
        self.answered += future.exception() is None
        self.errors += future.exception() is not None

    def report(self) -> None:
        """Say how many requests were answered, and how many failed."""
        log.info(f"traffic: {self.answered} requests answered, {self.errors} failed")
