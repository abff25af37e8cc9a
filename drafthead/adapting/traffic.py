"""Requests from a file of prompts, for a loop without clients of its own: what tests and the embedded target use."""

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from drafthead.config import Recipe
from drafthead.config.evaluation import LoadConfig
from drafthead.data.prompts import Prompt
from drafthead.data.rendering import renderer
from drafthead.engine.load import LoadRequest, LoadResult, run_load
from drafthead.engine.server import Server
from drafthead.generation.source_files import read
from drafthead.generation.sources import LOCAL, read_row
from drafthead.target.tokenizer import load_tokenizer


def send_traffic(recipe: Recipe, server: Server, path: Path, rate: float) -> "Future[LoadResult]":
    """Send the prompts of a file in its order, from a thread of its own, at `rate` requests per second.

    Every request consents to be captured and names its category as its workload; temperature, effort and length are the
    first of the recipe's responses section.
    """
    render, settings = renderer(recipe, load_tokenizer(recipe)), recipe.responses
    effort, temperature = next(iter(settings.efforts)), next(iter(settings.temperatures))
    requests = []
    for where, data in read(path):
        row = read_row(data, LOCAL)
        prompt = Prompt(where, path.stem, row.category or "all", row.messages, row.prompt_ids, row.tools)
        headers = {"X-Drafthead-Workload": prompt.category, "X-Drafthead-Capture": "yes"}
        requests.append(LoadRequest(where, render(prompt, effort), headers))
    load = LoadConfig(request_rate=rate, concurrency=recipe.engine.max_num_seqs)
    return ThreadPoolExecutor(1).submit(
        run_load, server, requests, load=load, max_tokens=settings.max_tokens, temperature=temperature, title="traffic"
    )
