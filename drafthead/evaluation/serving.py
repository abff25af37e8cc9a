"""Speed under load: the same prompts through a server without and with speculation, level by level.

One block starts the baseline's server and then the head's, the next block in the opposite order (ABBA), so
that a machine that gets slower over time does not favour an arm. Within a server the prefix cache is reset
before every level and a few real prompts warm it up. Every level sends the same prompts in both arms. With a
single block the intervals hold for prompts only: what differs from one server start to the next stays unseen.
"""

import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from drafthead.config import Recipe
from drafthead.evaluation.identity import identity
from drafthead.evaluation.request_metrics import achieved_concurrency, request_metrics
from drafthead.evaluation.workload import BASELINE, HEAD, NAMES, Workload, load_workload, speculative_config
from drafthead.provenance import atomic_path, begin, finish
from drafthead.serving.load import LoadRequest, LoadResult, preload, run_load, warm_up
from drafthead.serving.server import Server, running_server

KIND = "serving"
REACHED = 0.9  # of the asked concurrency: below it the level is labelled, not compared
_WARM_UP_PROMPTS, _WARM_UP_TOKENS = 8, 32
_COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "proposed": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
}


def measure_serving(recipe: Recipe) -> Path:
    """Measure every server of the ABBA plan that is not on disk yet; returns the artefact's directory.

    Raises:
        ArtefactError: prompts or head are missing, or the directory holds another measurement.
        ServerError: a server did not start, or died.
    """
    directory = recipe.results_dir / "serving"
    workload = load_workload(recipe)
    settings = recipe.eval.model_dump(include={"concurrency", "prompts_per_level", "repeats", "seed"})
    if begin(directory, KIND, identity(recipe, workload, (BASELINE, HEAD)) | {"load": settings}):
        return directory
    levels = level_requests(recipe, workload)
    plan = abba_plan(recipe.eval.repeats)
    threading.Thread(target=preload, daemon=True).start()  # while the first server starts
    for index, (block, arm) in enumerate(plan):
        if not (directory / f"runs-{index:02d}-{arm}.parquet").exists():
            _run_server(recipe, directory, index, block, arm, levels)
    counts = {"prompts_per_level": {str(c): len(r) for c, r in levels.items()}, "servers": len(plan)}
    finish(directory, counts | {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"})
    return directory


def abba_plan(repeats: int) -> list[tuple[int, str]]:
    """(block, arm) of every server in order: A B, then B A, then A B …"""
    order = (BASELINE, HEAD)
    return [(block, arm) for block in range(repeats) for arm in (order if block % 2 == 0 else order[::-1])]


def level_requests(recipe: Recipe, workload: Workload) -> dict[int, list[LoadRequest]]:
    """Concurrency -> the prompts of that level, an even draw over categories in a fixed order.

    At least eval.prompts_per_level and four per place in flight, as far as there are held-out prompts.
    """
    frame = pd.DataFrame({"category": [p.category for p in workload.prompts]})
    shuffled = frame.sample(frac=1, random_state=recipe.eval.seed)
    turn = shuffled.groupby("category").cumcount()  # first of each category, then second of each …
    order = turn.sort_values(kind="stable").index
    prompts = [LoadRequest(workload.prompts[i].id, workload.prompts[i].prompt_ids) for i in order]
    return {c: prompts[: max(recipe.eval.prompts_per_level, 4 * c)] for c in recipe.eval.concurrency}


def read_requests(directory: Path) -> pd.DataFrame:
    """One row per request: arm, block, concurrency, prompt_id, error, times in seconds, token counts, text."""
    return _read(directory, "requests-*.parquet")


def read_runs(directory: Path) -> pd.DataFrame:
    """One row per server and level: arm, block, concurrency, achieved, reached, duration_s, counters, command."""
    return _read(directory, "runs-*.parquet")


def _read(directory: Path, pattern: str) -> pd.DataFrame:
    return pd.concat([pd.read_parquet(path) for path in sorted(directory.glob(pattern))], ignore_index=True)


def _run_server(
    recipe: Recipe, directory: Path, index: int, block: int, arm: str, levels: dict[int, list[LoadRequest]]
) -> None:
    """One server through all levels. The file of runs is written last: it marks the server as measured."""
    runs: list[dict[str, Any]] = []
    requests: list[dict[str, Any]] = []
    name = f"{index:02d}-{arm}"
    logs = directory / "logs"
    with running_server(recipe, logs / f"{name}.server.log", speculative=speculative_config(recipe, arm)) as server:
        # Prompts of the end of the list: the levels start at its beginning.
        warm_up(server, max(levels.values(), key=len)[-_WARM_UP_PROMPTS:], _WARM_UP_TOKENS)
        for concurrency, prompts in levels.items():
            server.reset_prefix_cache()
            before = server.metrics()
            result = run_load(
                server,
                prompts,
                logs,
                concurrency=concurrency,
                max_tokens=recipe.eval.max_tokens,
                label=f"{name}-c{concurrency}",
                title=f"{NAMES[arm]}, {concurrency} at once",
            )
            counters = _counted(before, server.metrics(), recipe.eval.num_draft_tokens)
            key = {"arm": arm, "block": block, "concurrency": concurrency}
            runs.append(key | _run_row(server, concurrency, result) | counters)
            requests += [key | _request_row(result, i) for i in range(len(prompts))]
    for kind, rows in (("requests", requests), ("runs", runs)):
        with atomic_path(directory / f"{kind}-{name}.parquet") as temporary:
            pd.DataFrame(rows).to_parquet(temporary, index=False)


def _run_row(server: Server, concurrency: int, result: LoadResult) -> dict[str, Any]:
    good = [r for r in result.requests if not r.error]
    achieved = achieved_concurrency(good) if good else 0.0
    output_tokens = sum(r.output_tokens for r in good)
    return {
        "requests": len(result.requests),
        "failed": len(result.requests) - len(good),
        "achieved": achieved,
        "reached": achieved >= REACHED * concurrency,
        "duration_s": result.duration_s,
        "output_tokens": output_tokens,
        "prompt_tokens": sum(r.prompt_tokens for r in good),
        "output_tokens_per_s": output_tokens / result.duration_s,
        "server_start_s": server.start_s,
        "server_command": json.dumps(server.command),
        "load_command": json.dumps(result.command),
        "finished_at": time.time(),
    }


def _request_row(result: LoadResult, index: int) -> dict[str, Any]:
    times = result.requests[index]
    raw = {key: value for key, value in asdict(times).items() if key not in ("id", "latency_s", "ttft_s")}
    return {"prompt_id": times.id, **raw, **asdict(request_metrics(times))}


def _counted(before: dict[str, float], after: dict[str, float], K: int) -> dict[str, Any]:
    def grown(name: str) -> int:
        return int(after.get(name, 0) - before.get(name, 0))

    accepted_at = [grown(f"vllm:spec_decode_num_accepted_tokens_per_pos[{k}]") for k in range(K)]
    return {column: grown(name) for column, name in _COUNTERS.items()} | {"accepted_at": accepted_at}
