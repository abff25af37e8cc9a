"""What a serving measurement will do, decided before anything starts: servers in order, and every load on each.

A plan comes from a recipe (`recipe_plan`) or from a preset that repeats a published experiment
(drafthead/evaluation/measuring/presets.py). Making one reads no file and starts no server, so all of it can be checked
first.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from drafthead.config import Recipe
from drafthead.config.evaluation import LoadConfig
from drafthead.evaluation.workload import BASELINE, SAMPLED, method_of, methods_at
from drafthead.section import Section

PER_PLACE = 4  # prompts for every request in flight, so that a level spends most of its time full


class WorkloadSpec(Section):
    """Which prompts a level sends: all held-out ones, those of one source or category, or random tokens."""

    name: str = "all"
    source: str | None = None
    category: str | None = None
    random: tuple[int, int] | None = None  # prompt and response length in tokens; throughput only
    turns: int = 1  # more: conversations, each turn with the ones before it as its prefix
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


CONVERSATIONS = WorkloadSpec(name="multi-turn", turns=3)


def is_conversations(workload: str) -> bool:
    """Whether rows of that label are of conversations; the label may go on with temperature and GPUs."""
    return workload.startswith(CONVERSATIONS.name)


def recipe_plan(recipe: Recipe) -> Plan:
    """Baseline, served methods and endpoints under the recipe's loads and temperatures.

    At the highest concurrency and the main temperature conversations are measured too: a draft model may cost hits in
    the prefix cache, which prompts that share nothing cannot show.
    """
    settings = recipe.eval
    main, *_ = settings.temperatures

    def level(load: LoadConfig, temperature: float, workload: WorkloadSpec) -> Level:
        return Level(
            workload, load, prompts_of_level(load, settings.prompts_per_level), settings.max_tokens, temperature
        )

    def levels(method: str) -> tuple[Level, ...]:
        temperatures = [t for t in settings.temperatures if t > 0 or method != SAMPLED]
        found = [level(load, t, WorkloadSpec()) for t in temperatures for load in settings.all_loads]
        if settings.concurrency and main in temperatures:
            found.append(level(LoadConfig(concurrency=max(settings.concurrency)), main, CONVERSATIONS))
        return tuple(found)

    served = methods_at(recipe, settings.served, max(settings.temperatures))
    methods = [
        (BASELINE, 0),
        *((name, k) for name in served for k in settings.draft_tokens_of(method_of(recipe, name))),
    ]
    tensor_parallel = recipe.engine.tensor_parallel_size
    servers = [ServerRun(0, name, k, levels(name), tensor_parallel) for name, k in methods]
    servers += [
        ServerRun(0, endpoint.name, 0, levels(endpoint.name), tensor_parallel, endpoint=True)
        for endpoint in settings.endpoints
    ]
    return Plan(abba(servers, settings.repeats), allow_unreached=settings.allow_unreached)


def served_recipe(recipe: Recipe, loads: Sequence[LoadConfig] = ()) -> Recipe:
    """The recipe with the batch limit of its servers as `engine.max_num_seqs`: what is measured, and then deployed.

    Args:
        recipe: as given.
        loads: to be served; none: the recipe's own.
    """
    places = [load.concurrency or 0 for load in loads or recipe.eval.all_loads]
    limit = recipe.eval.max_num_seqs or max([recipe.engine.max_num_seqs, *places])
    return recipe.model_copy(update={"engine": recipe.engine.model_copy(update={"max_num_seqs": limit})})


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
