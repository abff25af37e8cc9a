"""What a serving measurement will do, decided before anything starts: servers in order, and every load on each.

A plan comes from a recipe (`recipe_plan`) or from a preset that repeats a published experiment
(drafthead/evaluation/measuring/presets.py). Making one starts no server, so all of it can be checked first.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from drafthead.artifacts import MANIFEST
from drafthead.config import Recipe
from drafthead.config.evaluation import ALL, CONVERSATIONS, EndpointConfig, LoadConfig, Loads, MethodConfig
from drafthead.data.prompts import read_prompts
from drafthead.evaluation.columns import LevelKey
from drafthead.evaluation.workload import BASELINE, SAMPLED, load_workload, method_of, methods_at
from drafthead.section import Section
from drafthead.statistics import FEWEST_PROMPTS

_LOG = logging.getLogger(__name__)
PER_PLACE = 4  # prompts for every request in flight, so that a level spends most of its time full


class WorkloadSpec(Section):
    """Which prompts a level sends: all held-out ones, those of one source or category, or random tokens."""

    name: str = ALL
    source: str | None = None
    category: str | None = None  # as the recipe names it, or without the source's prefix
    exact: bool = False  # only as the recipe names it
    first_question: bool = False  # of every conversation that alone
    random: tuple[int, int] | None = None  # prompt and response length in tokens; throughput only
    prompts: int | None = None  # at every load, at least; None: the experiment's
    max_tokens: int | None = None  # of a response; None: the experiment's
    most_at_once: int | None = None  # loads above it are left out
    turns: int = 1  # more: conversations, each turn with the ones before it as its prefix
    miniature: str | None = None  # category that stands in for it in a miniature
    parts: tuple["WorkloadSpec", ...] = ()  # what it is mixed of: prompts and longest response of each are its own

    @property
    def throughput_only(self) -> bool:
        """Whether acceptance on it means nothing: nobody writes random tokens."""
        return self.random is not None or self.source == "burstgpt"

    @property
    def wanted(self) -> str:
        """The prompts that it needs."""
        return f"category {self.category}" if self.category else f"source {self.source}"

    def holds(self, source: str, category: str) -> bool:
        """Whether a prompt belongs to it: by its category where one is asked for, from whatever source."""
        if self.parts:
            return any(part.holds(source, category) for part in self.parts)
        if self.category is None:
            return self.source in (None, source)
        return category == self.category or (not self.exact and category.endswith(f"/{self.category}"))


@dataclass(frozen=True)
class PlannedLoad:
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
    levels: tuple[PlannedLoad, ...]
    tensor_parallel: int = 1
    flags: tuple[str, ...] = ()
    endpoint: bool = False

    @property
    def name(self) -> str:
        """Names its files, together with its index."""
        return f"{self.method}-k{self.k}-tp{self.tensor_parallel}"

    def key(self, level: PlannedLoad) -> LevelKey:
        """What the rows of this server at a level are of."""
        return LevelKey(level.workload.name, level.temperature, self.tensor_parallel, self.method, self.k, level.load)


class Sweep(Section):
    """Loads of one method after another: what varies, the rest held. A table of a published post is one."""

    title: str = ""
    workloads: tuple[WorkloadSpec, ...] = (WorkloadSpec(),)
    loads: Loads
    temperatures: tuple[float, ...] = (0.0,)
    prompts_per_level: int
    prompts_per_place: float = 0  # more of them where a load has many places
    max_tokens: int | None = None  # None: the recipe's
    disjoint: bool = False  # no two loads of a workload share a prompt

    def levels(self, recipe: Recipe) -> tuple[PlannedLoad, ...]:
        """Every load at every temperature on every workload."""
        found = []
        for workload, temperature in product(self.workloads, self.temperatures):
            first = 0
            for load in self.loads:
                places = load.concurrency or 0
                if workload.most_at_once and places > workload.most_at_once:
                    continue
                count = max(workload.prompts or self.prompts_per_level, int(self.prompts_per_place * places))
                longest = workload.random[1] if workload.random else workload.max_tokens or self.max_tokens
                found.append(PlannedLoad(workload, load, count, longest or recipe.eval.max_tokens, temperature, first))
                first += count if self.disjoint else 0
        return tuple(found)


class PlannedSweep(NamedTuple):
    """Levels of a plan that a published post shows together.

    Attributes:
        title: of the section.
        measures: keys of `results.levels.MEASURE`, in the post's order.
        keys: what they measure, baseline included.
    """

    title: str
    measures: tuple[str, ...]
    keys: frozenset[LevelKey]


class ServePlan(NamedTuple):
    """What is served: the facts of one measurement, which the recipe is not told.

    Attributes:
        runs: servers in order.
        skipped: what the experiment asks for that cannot be run, with the reason.
        sweeps: tables of a preset, whose loads are measured as published even where unreached.
        added: methods of the experiment that the recipe does not list.
    """

    runs: tuple[ServerRun, ...]
    skipped: tuple[str, ...] = ()
    sweeps: tuple[PlannedSweep, ...] = ()
    added: tuple[MethodConfig, ...] = ()


def recipe_plan(recipe: Recipe) -> ServePlan:
    """Baseline, served methods and endpoints, on all held-out prompts and on each workload of the recipe.

    At the highest concurrency and the main temperature conversations are measured too: a draft model may cost hits in
    the prefix cache, which prompts that share nothing cannot show.
    """
    settings = recipe.eval
    return methods_plan(
        recipe, settings.served, settings.loads, settings.repeats, workload_names(recipe), settings.endpoints
    )


def methods_plan(
    recipe: Recipe, served: Sequence[str], loads: Loads, repeats: int, names: Sequence[str] = (),
    endpoints: Sequence[EndpointConfig] = (), added: tuple[MethodConfig, ...] = (),
) -> ServePlan:  # fmt: skip
    """`recipe_plan` of some methods and loads.

    Args:
        recipe: temperatures, draft lengths and number of prompts.
        served: methods by name, beside the baseline.
        loads: under which everything is measured.
        repeats: ABBA blocks.
        names: workloads that are measured alone, too.
        endpoints: servers that run already.
        added: methods that the recipe does not list.
    """
    settings = recipe.eval
    # Each workload gets its share of the prompts, and no fewer than an interval needs.
    share = {"prompts": max(FEWEST_PROMPTS, settings.prompts_per_level // max(1, len(names)))}
    alone = [WorkloadSpec.model_validate({"name": n, settings.workloads: n, "exact": True} | share) for n in names]
    every = Sweep(
        workloads=(WorkloadSpec(), *alone), loads=loads, temperatures=settings.temperatures,
        prompts_per_level=settings.prompts_per_level, prompts_per_place=PER_PLACE,
    )  # fmt: skip
    levels = every.levels(recipe)
    if steady := [load for load in loads if load.request_rate is None]:
        most = max(steady, key=lambda load: load.concurrency or 0)
        talks = WorkloadSpec(name=CONVERSATIONS, turns=3)
        update = {"workloads": (talks,), "loads": (most,), "temperatures": settings.temperatures[:1]}
        levels += every.model_copy(update=update).levels(recipe)
    served = methods_at(recipe, served, max(settings.temperatures))
    series = [(name, k) for name in served for k in settings.draft_tokens_of(method_of(recipe, name, added))]
    gpus, sampled = recipe.engine.tensor_parallel_size, tuple(level for level in levels if level.temperature > 0)
    servers = [ServerRun(0, m, k, sampled if m == SAMPLED else levels, gpus) for m, k in ((BASELINE, 0), *series)]
    servers = [server for server in servers if server.levels]
    servers += [ServerRun(0, endpoint.name, 0, levels, gpus, endpoint=True) for endpoint in endpoints]
    return ServePlan(abba(servers, repeats), added=added)


def workload_names(recipe: Recipe) -> list[str]:
    """The sources or categories of which enough held-out prompts fit for an interval and for every load.

    Empty where there is one only, where the recipe wants none, and before the prompts are made.
    """
    kind = recipe.eval.workloads
    if kind == ALL or not (recipe.prompts_dir / MANIFEST).exists():
        return []
    found = dict.fromkeys(sorted(getattr(prompt, kind) for prompt in read_prompts(recipe.prompts_dir, "heldout")), 0)
    found |= Counter(getattr(prompt, kind) for prompt in load_workload(recipe).prompts)
    if sum(count > 0 for count in found.values()) < 2:
        return []
    enough = max(FEWEST_PROMPTS, *(load.concurrency or 0 for load in recipe.eval.loads))
    alone = []
    for name, count in found.items():
        if name in (ALL, CONVERSATIONS):
            _LOG.info(f"{name} is a workload of other prompts: rename the {kind} to measure it alone")
        elif count < enough:
            _LOG.info(f"{name} has {count} held-out prompts, {enough} are needed to measure it alone: only in `{ALL}`")
        else:
            alone.append(name)
    return alone


def served_recipe(recipe: Recipe, loads: Sequence[LoadConfig] = ()) -> Recipe:
    """The recipe with the batch limit of its servers as `engine.max_num_seqs`: what is measured, and then deployed.

    Args:
        recipe: as given.
        loads: to be served; none: the recipe's own.
    """
    places = [load.concurrency or 0 for load in loads or recipe.eval.loads]
    return recipe.changed("engine", max_num_seqs=max([recipe.engine.max_num_seqs, *places]))


def abba(servers: Sequence[ServerRun], repeats: int) -> tuple[ServerRun, ...]:
    """Blocks of all servers, every second one in the opposite order: A B, B A, A B …"""
    return tuple(
        replace(server, block=block)
        for block in range(repeats)
        for server in (servers if block % 2 == 0 else servers[::-1])
    )
