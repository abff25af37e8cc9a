"""Rows of evaluations: made up without an engine, with a known outcome, and read from those of real servers."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from drafthead.artifacts import MANIFEST, begin, finish, read_json, reference
from drafthead.config import Recipe
from drafthead.config.evaluation import ALL
from drafthead.evaluation.columns import ACCEPTANCE_COLUMNS, REQUEST_COLUMNS, RUN_COLUMNS, read_rows
from drafthead.evaluation.measuring.plan import served_recipe
from drafthead.evaluation.results.levels import ServingRows, read_serving
from drafthead.evaluation.workload import MethodNames

CATEGORIES = ("chat", "code", "long", "structured")
K = 3
NAMES = MethodNames("EAGLE-3")
TIMES = ("ttft_s", "ttfot_s", "e2e_s", "tpot_s", "itl_s", "itl_answer_s", "tpot_all_s", "duration_s")
POSITIONS = (0.7, 0.45, 0.25)  # joint prefix acceptance under load
BY_STEP = (3, 3, 3, 3, 3, 2, 2, 2, 2, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0)  # the same
LENGTHS = {k: 1 + sum(POSITIONS[:k]) for k in range(1, K + 1)}
JUDGED = ("output_tokens_per_s", "e2e_p50")  # the measures that a verdict without a service level rests on


def write_results(
    recipe: Recipe,
    *,
    head_speed: dict[int, float],
    prompts: int = 48,
    lengths: tuple[int, ...] = (K,),
    workloads: tuple[str, ...] = (ALL,),
) -> None:
    """Acceptance and serving artifacts.

    Args:
        recipe: where to.
        head_speed: concurrency -> speed of the head at K = 3 relative to the baseline; 1.0 is noise only.
        prompts: held-out prompts.
        lengths: draft lengths; none: K.
        workloads: names; none: all prompts.
    """
    rng = np.random.default_rng(0)
    directory = recipe.results_dir / "acceptance"
    begin(directory, "acceptance", _identity(recipe))
    for method, quality in (("none", None), ("head", 0.7), ("ngram", 0.2)):
        rows = [_answer(rng, method, i, quality) for i in range(prompts)]
        if method == "none":
            rows += [{**row, "again": True} for row in rows]
        pd.DataFrame(rows).to_parquet(directory / f"method-{method}.parquet")
    finish(directory, {"prompts": prompts, "too_long": 0, "methods": 3})
    directory = recipe.results_dir / "serving"
    begin(directory, "serving", _identity(recipe))
    series = [("none", 0), *(("head", k) for k in lengths)]
    for index, (method, k) in enumerate(series):
        requests, runs = [], []
        for workload in workloads:
            extra = {"k": k, "workload": workload}
            for concurrency, speed in head_speed.items():
                faster = speed_at(speed, k) if k else 1.0
                rows = [request_row(rng, method, concurrency, i, faster, k) | extra for i in range(prompts)]
                requests += rows
                runs.append(run_row(method, concurrency, rows, k) | extra)
        pd.DataFrame(requests).to_parquet(directory / f"requests-{index:02d}-{method}.parquet")
        pd.DataFrame(runs).to_parquet(directory / f"runs-{index:02d}-{method}.parquet")
    finish(directory, {"servers": 2, "failed": [], "device": "CPU"})


def served(recipe: Recipe, **options: Any) -> ServingRows:
    """Rows of serving as they are read; the options of `write_results`."""
    write_results(recipe, **options)
    return read_serving(recipe.results_dir / "serving")


def counted(directory: Path) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Requests and runs of real servers, whose requests say of their drafts in sum what the servers counted."""
    requests, runs = (read_rows(directory, f"{kind}-*.parquet") for kind in ("requests", "runs"))
    level = ["method", "k", "block", "workload", "temperature", "load"]
    of_servers = runs[runs["k"] > 0].set_index(level)[["drafts", "accepted"]]
    steps = requests.set_index(level)["accepted_by_step"].explode().dropna().groupby(level).agg(["size", "sum"])
    assert of_servers["drafts"].sum() > 0
    assert (steps.reindex(of_servers.index, fill_value=0) == of_servers.to_numpy()).all(None)
    return requests, runs


def each(rows: ServingRows, change: Callable[[pd.DataFrame], pd.DataFrame]) -> ServingRows:
    """Requests and runs, changed alike."""
    return ServingRows(*map(change, rows))


def together(*parts: ServingRows) -> ServingRows:
    """All of them, one behind the other."""
    return ServingRows(*(pd.concat(frames, ignore_index=True) for frames in zip(*parts, strict=True)))


def slower(frame: pd.DataFrame, factor: float) -> pd.DataFrame:
    """The same with times that are so many times as long."""
    return frame.assign(**{name: frame[name] * factor for name in TIMES if name in frame})


def speed_at(longest: float, k: int) -> float:
    """Speed at K = k on a machine whose steps get longer by as much for every draft token."""
    ratio = 1 + (LENGTHS[K] / longest - 1) * k / K
    return LENGTHS[k] / ratio


def _identity(recipe: Recipe) -> dict:
    manifest = recipe.head_dir / MANIFEST
    return {
        "target": "data_gen/tiny/target", "target_fingerprint": "0" * 64,
        "dtype": recipe.target.dtype, "head": reference(read_json(manifest)) if manifest.exists() else "1" * 64,
        "num_draft_tokens": K, "max_tokens": 192, "reasoning_effort": "medium",
        "engine": served_recipe(recipe).engine.model_dump(),
        "methods": [method.model_dump(include={"name", "method", "extra"}) for method in recipe.eval.methods],
    }  # fmt: skip


def _answer(rng: np.random.Generator, method: str, index: int, quality: float | None) -> dict:
    drafts = int(rng.integers(20, 40)) if quality else 0
    accepted_at = np.sort(rng.binomial(drafts, [(quality or 0) ** (k + 1) for k in range(K)]))[::-1]
    accepted_at = accepted_at[: K if quality else 0]
    looping = index % 16 == 0
    return dict.fromkeys(ACCEPTANCE_COLUMNS, 0) | {
        "method": method, "again": False, "k": K if drafts else 0, "effort": "medium", "prompt_id": f"p{index:03d}",
        "category": CATEGORIES[index % len(CATEGORIES)], "prompt_tokens": 100,
        "output_sha256": hashlib.sha256(f"{index}".encode()).hexdigest(),
        # N-gram has steps without a draft.
        "num_tokens": 1 + drafts + int(accepted_at.sum()) if method == "head" else 80,
        "drafts": drafts, "proposed": K * drafts, "accepted": int(accepted_at.sum()),
        "accepted_at": accepted_at.tolist(),
        "accepted_by_step": [int((accepted_at > step).sum()) for step in range(drafts)],  # fewer and fewer
        "reached_at": [drafts, *accepted_at[:-1].tolist()][: len(accepted_at)],
        "finish_reason": "length" if looping else "stop", "repeated": 0.8 if looping else 0.0,
    }  # fmt: skip


def request_row(rng: np.random.Generator, method: str, concurrency: int, index: int, speed: float, k: int = 0) -> dict:
    tokens, looping = 60 + index % 30, index % 20 == 19
    tpot = 0.004 * concurrency**0.5 / speed * rng.lognormal(0, 0.05)
    ttft = 0.02 / speed * rng.lognormal(0, 0.05)
    return dict.fromkeys(REQUEST_COLUMNS, 0) | _level(method, concurrency) | {
        "prompt_id": f"p{index:03d}", "error": "", "prompt_tokens": 100, "output_tokens": tokens,
        "start_s": 0.1 * index, "ttft_s": ttft, "ttfot_s": 2 * ttft, "e2e_s": ttft + tpot * (tokens - 1),
        "tpot_s": tpot, "itl_s": tpot, "tpot_all_s": ttft / tokens + tpot,
        # Of a loop every draft is accepted.
        "accepted_by_step": [k if looping else min(k, accepted) for accepted in BY_STEP * 3] if k else [],
        "repeated": 0.8 if looping else 0.0,
    }  # fmt: skip


def run_row(method: str, concurrency: int, rows: list[dict], k: int) -> dict:
    duration = sum(r["e2e_s"] for r in rows) / concurrency
    drafts = 1000 if method == "head" else 0
    achieved = concurrency if concurrency < 100 else 48.0
    return dict.fromkeys(RUN_COLUMNS, 0) | _level(method, concurrency) | {
        "k": k, "requests": len(rows), "achieved": achieved, "running": achieved,
        "reached": achieved >= 0.9 * concurrency, "duration_s": duration,
        "output_tokens": sum(r["output_tokens"] for r in rows), "prompt_tokens": 100 * len(rows),
        "weights_gib": np.nan, "drafts": drafts, "proposed": k * drafts,
        "accepted": round(sum(POSITIONS[:k]) * drafts),
        "accepted_at": [round(share * drafts) for share in POSITIONS[: k or K]],
        "kv_cache_tokens": 90_000 if method == "head" else 100_000,
    }  # fmt: skip


def _level(method: str, concurrency: int) -> dict:
    """What requests and runs say of their level, the draft length excepted."""
    return {
        "method": method, "tensor_parallel": 1, "workload": ALL, "throughput_only": False, "load": f"c{concurrency}",
        "concurrency": concurrency, "request_rate": np.inf, "burstiness": 1.0,
    }  # fmt: skip
