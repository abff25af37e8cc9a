"""Published experiments as data: one word repeats one of them on the recipe's target and heads.

A preset says which workloads, methods, K, loads and server flags an experiment used. What it published stays elsewhere;
here is only how it was run. `miniature` shrinks it to the embedded recipe, where every code path but the size is
the same.
"""

from importlib import resources
from importlib.resources.abc import Traversable
from itertools import product
from typing import Literal

import yaml
from pydantic import Field

from drafthead.config import Recipe
from drafthead.config.evaluation import HEADS, LoadConfig, Method
from drafthead.evaluation.measuring.plan import Level, Plan, ServerRun, WorkloadSpec, abba, prompts_of_level
from drafthead.evaluation.workload import BASELINE, HEAD, method_of, missing_package
from drafthead.section import Section


class PresetMethod(Section):
    """Every entry of eval.methods that drafts with this method, at these Ks; `none` is the baseline.

    `head` stands for the method of the recipe's own head.
    """

    method: Method | Literal["none", "head"]
    num_draft_tokens: tuple[int, ...] = ()


class Miniature(Section):
    """The same experiment at the size of the embedded target."""

    concurrency: tuple[int, ...] = (1, 2)
    request_rate: float = 20.0  # of every load that has a rate
    prompts_per_level: int = 4
    max_tokens: int = 16
    random_divisor: int = 64  # of the lengths of random workloads
    most_draft_tokens: int = 3
    flags: tuple[str, ...] = ()


class Preset(Section):
    """One published experiment."""

    title: str
    note: str  # what to know before comparing
    workloads: tuple[WorkloadSpec, ...]
    methods: tuple[PresetMethod, ...]
    concurrency: tuple[int, ...] = ()
    loads: tuple[LoadConfig, ...] = ()
    rate_is_concurrency: bool = False  # requests per second as many as places
    temperatures: tuple[float, ...] = (0.0,)
    tensor_parallel: tuple[int, ...] = (1,)
    flags: tuple[str, ...] = ()
    prompts_per_level: int
    prompts_per_place: float = 0
    disjoint: bool = False  # no two levels share a prompt
    allow_unreached: bool = False
    endpoints: bool = False  # the recipe's endpoints beside the servers started here
    miniature: Miniature = Field(default_factory=Miniature)


def preset_names() -> list[str]:
    """Those that ship."""
    return sorted(path.name.removesuffix(".yaml") for path in _folder().iterdir() if path.name.endswith(".yaml"))


def load_preset(name: str) -> Preset:
    """Read one by name.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in preset_names():
        raise ValueError(f"no preset {name}; there are {', '.join(preset_names())}")
    return Preset.model_validate(yaml.safe_load((_folder() / f"{name}.yaml").read_text(encoding="utf-8")))


def preset_plan(recipe: Recipe, preset: Preset, miniature: bool = False) -> Plan:
    """The preset's servers and levels on the recipe's target.

    Args:
        recipe: target, methods, endpoints, repeats and longest response.
        preset: the experiment.
        miniature: at the size of the embedded target, on one device.
    """
    small = preset.miniature if miniature else None
    levels = _levels(recipe, preset, small)
    servers, skipped = _servers(recipe, preset, small)
    tensor_parallel = (1,) if small else preset.tensor_parallel
    runs = [
        ServerRun(0, method, k, levels, tp, small.flags if small else preset.flags)
        for tp in tensor_parallel
        for method, k in servers
    ]
    if preset.endpoints:
        runs += [ServerRun(0, endpoint.name, 0, levels, endpoint=True) for endpoint in recipe.eval.endpoints]
        if not recipe.eval.endpoints:
            skipped.append("other engines: name them in eval.endpoints (name, url, model)")
    if small and len(preset.tensor_parallel) > 1:
        skipped.append(f"tensor parallelism {max(preset.tensor_parallel)}: a miniature runs on one device")
    return Plan(abba(runs, recipe.eval.repeats), tuple(skipped), preset.allow_unreached or miniature)


def _folder() -> Traversable:
    return resources.files("drafthead.evaluation.measuring") / "experiments"


def _levels(recipe: Recipe, preset: Preset, small: Miniature | None) -> tuple[Level, ...]:
    loads = _loads(preset, small)
    levels = []
    for workload, temperature in product(preset.workloads, preset.temperatures):
        first = 0
        for load in loads:
            if small:
                count = small.prompts_per_level
            else:
                count = prompts_of_level(load, preset.prompts_per_level, preset.prompts_per_place)
            spec = _shrunk(workload, small) if small else workload
            longest = spec.random[1] if spec.random else (small.max_tokens if small else recipe.eval.max_tokens)
            levels.append(Level(spec, load, count, longest, temperature, first))
            first += count if preset.disjoint else 0
    return tuple(levels)


def _loads(preset: Preset, small: Miniature | None) -> list[LoadConfig]:
    loads = [LoadConfig(concurrency=c) for c in (small.concurrency if small else preset.concurrency)]
    if not preset.concurrency:
        loads = []
    if preset.rate_is_concurrency:
        rate = small.request_rate if small else None
        loads = [LoadConfig(concurrency=load.concurrency, request_rate=rate or load.concurrency) for load in loads]
    for load in preset.loads:
        shrunk = {"concurrency": min(load.concurrency or 2, 2), "request_rate": load.request_rate and 20.0}
        loads.append(load.model_copy(update=shrunk) if small else load)
    return list({load.name: load for load in loads}.values())


def _shrunk(workload: WorkloadSpec, small: Miniature) -> WorkloadSpec:
    if workload.random:
        lengths = tuple(max(4, length // small.random_divisor) for length in workload.random)
        return workload.model_copy(update={"random": lengths})
    return workload.model_copy(update={"source": None, "category": workload.miniature})


def _servers(recipe: Recipe, preset: Preset, small: Miniature | None) -> tuple[list[tuple[str, int]], list[str]]:
    servers: list[tuple[str, int]] = []
    skipped = []
    for entry in preset.methods:
        if entry.method == BASELINE:
            servers.append((BASELINE, 0))
            continue
        drafting = HEAD if entry.method == "head" else entry.method
        names = [own.name for own in recipe.eval.methods if own.method == drafting]
        if missing := missing_package(drafting):
            skipped.append(f"{drafting}: {missing}")
            continue
        if not names and drafting in HEADS and drafting != HEAD:
            skipped.append(f"{drafting}: eval.methods has no head for it; {HEADS[drafting]}")
        for name in names or ([drafting] if drafting == HEAD or drafting not in HEADS else []):
            ks = entry.num_draft_tokens or recipe.eval.draft_tokens_of(method_of(recipe, name))
            if small:
                ks = tuple(k for k in ks if k <= small.most_draft_tokens)[:2] or (small.most_draft_tokens,)
            servers += [(name, k) for k in ks]
    return servers, skipped
