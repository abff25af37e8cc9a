"""What a serving measurement will do, decided before anything starts: servers in order, and every load on each.

A plan comes from a recipe (`recipe_plan`) or from a preset that repeats a published experiment
(drafthead/evaluation/measuring/presets.py). Making one reads no file and starts no server, so all of it can be checked
first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from drafthead.config import Recipe
from drafthead.config.evaluation import LoadConfig
from drafthead.evaluation.workload import BASELINE, method_of
from drafthead.section import Section

PER_PLACE = 4  # prompts for every request in flight, so that a level spends most of its time full


class WorkloadSpec(Section):
    """Which prompts a level sends: all held-out ones, those of one source or category, or random tokens."""

    name: str = "all"
    source: str | None = None
    category: str | None = None
    random: tuple[int, int] | None = None  # prompt and response length in tokens; throughput only
    miniature: str | None = None  # category that stands in for it in a miniature

    @property
    def throughput_only(self) -> bool:
        """Whether acceptance on it means nothing: nobody writes random tokens."""
        return self.random is not None or self.source == "burstgpt"


@dataclass(frozen=True)
class Level:
    """One load on a running server.

    Attributes:
        workload, load: what is sent, and how.
        prompts: how many; fewer where there are fewer.
        first: index of the first one, for levels that must not share prompts.
        temperature: of the responses.
        max_tokens: longest response.
    """

    workload: WorkloadSpec
    load: LoadConfig
    prompts: int
    max_tokens: int
    temperature: float = 0.0
    first: int = 0

    @property
    def name(self) -> str:
        """Names its files."""
        return f"{self.workload.name}-{self.load.name}-t{self.temperature:g}"


@dataclass(frozen=True)
class ServerRun:
    """One server from start to stop, and its levels in order.

    Attributes:
        block: of the ABBA design.
        method, k: what drafts, and how many tokens; 0 for the baseline and for servers of others.
        tensor_parallel: GPUs.
        flags: further flags of vLLM's server.
        endpoint: whether `method` names an endpoint of the recipe, a server that is running already.
    """

    block: int
    method: str
    k: int
    levels: tuple[Level, ...]
    tensor_parallel: int = 1
    flags: tuple[str, ...] = ()
    endpoint: bool = False

    @property
    def name(self) -> str:
        """Names its files, together with its index."""
        return f"{self.method}-k{self.k}-tp{self.tensor_parallel}"


@dataclass(frozen=True)
class Plan:
    """Servers in order, and what the experiment asks for that cannot be run, with the reason."""

    runs: tuple[ServerRun, ...]
    skipped: tuple[str, ...] = ()
    allow_unreached: bool = False


def recipe_plan(recipe: Recipe) -> Plan:
    """Baseline, served methods and endpoints under the recipe's loads and temperatures."""
    settings = recipe.eval
    levels = tuple(
        Level(
            WorkloadSpec(),
            load,
            prompts_of_level(load, settings.prompts_per_level),
            settings.max_tokens,
            temperature,
        )
        for temperature in settings.temperatures
        for load in settings.all_loads
    )
    speculative = [(name, k) for name in settings.served for k in settings.draft_tokens_of(method_of(recipe, name))]
    servers = [ServerRun(0, BASELINE, 0, levels), *(ServerRun(0, name, k, levels) for name, k in speculative)]
    servers += [ServerRun(0, endpoint.name, 0, levels, endpoint=True) for endpoint in settings.endpoints]
    tensor_parallel = recipe.engine.tensor_parallel_size
    servers = [replace(server, tensor_parallel=tensor_parallel) for server in servers]
    return Plan(abba(servers, settings.repeats), allow_unreached=settings.allow_unreached)


def abba(servers: Sequence[ServerRun], repeats: int) -> tuple[ServerRun, ...]:
    """Blocks of all servers, every second one in the opposite order: A B, B A, A B …"""
    return tuple(
        replace(server, block=block)
        for block in range(repeats)
        for server in (servers if block % 2 == 0 else servers[::-1])
    )


def prompts_of_level(load: LoadConfig, least: int, per_place: float = PER_PLACE) -> int:
    """At least `least`, and `per_place` for every request in flight."""
    return max(least, int(per_place * (load.concurrency or 0)))
