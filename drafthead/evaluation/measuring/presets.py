"""Published experiments as data: one word repeats one of them on the recipe's target and heads.

A preset says which workloads, methods, K, loads and server flags an experiment used, table by table; what it published
is in docs/published.yaml. `miniature` shrinks it to the embedded recipe, where every code path but the size is the
same.
"""

from importlib import resources
from importlib.resources.abc import Traversable
from itertools import product
from typing import Any, Literal

import yaml
from pydantic import Field

from drafthead.artifacts import MANIFEST
from drafthead.config import Recipe
from drafthead.config.evaluation import HEADS, LoadConfig, Method, MethodConfig
from drafthead.data.prompts import read_prompts
from drafthead.evaluation.measuring.plan import (
    Level,
    Plan,
    PlannedSweep,
    ServerRun,
    WorkloadSpec,
    abba,
    prompts_of_level,
)
from drafthead.evaluation.workload import BASELINE, HEAD, method_of, missing_package
from drafthead.section import Section


class PresetMethod(Section):
    """Every entry of eval.methods that drafts with this method, at these Ks; `none` is the baseline.

    `head` stands for the method of the recipe's own head. With `model` the entry is a public draft model, served where
    the recipe's target is `target`.
    """

    method: Method | Literal["none", "head"]
    num_draft_tokens: tuple[int, ...] = ()
    name: str = ""
    model: str = ""
    target: str = ""
    extra: dict[str, Any] = Field(default_factory=dict)


class Miniature(Section):
    """The same experiment at the size of the embedded target."""

    concurrency: int = 2  # of every load above it
    request_rate: float = 20.0  # of every load that has a rate
    temperatures: tuple[float, ...] = (0.0, 0.5)  # those of the experiment that are kept
    prompts_per_level: int = 4
    max_tokens: int = 16
    random_divisor: int = 64  # of the lengths of random workloads
    most_draft_tokens: int = 3
    flags: tuple[str, ...] = ()


class Sweep(Section):
    """One table of the post: what it varies, the rest held."""

    title: str
    workloads: tuple[WorkloadSpec, ...] = (WorkloadSpec(),)
    methods: tuple[PresetMethod, ...]
    concurrency: tuple[int, ...] = ()
    loads: tuple[LoadConfig, ...] = ()
    rate_is_concurrency: bool = False  # requests per second as many as places
    temperatures: tuple[float, ...] = (0.0,)
    tensor_parallel: tuple[int, ...] = ()  # none: the recipe's
    prompts_per_level: int
    prompts_per_place: float = 0
    max_tokens: int | None = None  # None: the recipe's
    measures: tuple[str, ...]
    endpoints: bool = False  # the recipe's endpoints beside the servers started here


class Preset(Section):
    """One published experiment."""

    title: str
    note: str  # what to know before comparing
    sweeps: tuple[Sweep, ...]
    flags: tuple[str, ...] = ()
    disjoint: bool = False  # no two loads of a workload share a prompt
    tpot_limits_ms: tuple[float, ...] = ()  # service levels to recommend a method for
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


def preset_recipe(recipe: Recipe, preset: Preset) -> Recipe:
    """The recipe with the public draft models of the preset that are made for its target."""
    methods = {method.name: method for method in recipe.eval.methods}
    for entry in (method for sweep in preset.sweeps for method in sweep.methods):
        if entry.model and entry.target == recipe.target.path:
            public = MethodConfig(name=entry.name, method=entry.method, head=entry.model, extra=entry.extra)  # type: ignore[arg-type]
            methods.setdefault(entry.name, public)
    return recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"methods": tuple(methods.values())})})


def preset_plan(recipe: Recipe, preset: Preset, miniature: bool = False) -> Plan:
    """The preset's servers and levels on the recipe's target, and the tables of its report.

    A server is started once, whatever the number of tables it stands in.

    Args:
        recipe: target, methods, endpoints, repeats and longest response (from `preset_recipe`).
        preset: the experiment.
        miniature: at the size of the embedded target, on one device.
    """
    small = preset.miniature if miniature else None
    flags = small.flags if small else preset.flags
    servers: dict[tuple[str, int, int, bool], dict[str, Level]] = {}
    sweeps, skipped = [], []
    there = None if small else _heldout(recipe)
    for sweep in preset.sweeps:
        sweep, missing = _with_prompts(sweep, there)
        skipped += missing
        if not sweep.workloads:
            continue
        levels = _levels(recipe, sweep, small, preset.disjoint)
        series, left_out = _series(recipe, sweep, small)
        skipped += left_out
        parallel = sweep.tensor_parallel or (recipe.engine.tensor_parallel_size,)
        if small and max(parallel) > 1:
            skipped.append(f"tensor parallelism {max(parallel)}: a miniature runs on one device")
            parallel = (1,)
        endpoints = [(endpoint.name, 0) for endpoint in recipe.eval.endpoints] if sweep.endpoints else []
        if sweep.endpoints and not endpoints:
            skipped.append("other engines: name them in eval.endpoints (name, url, model)")
        for gpus in parallel:
            for method, k in (*series, *endpoints):
                own = servers.setdefault((method, k, gpus, (method, k) in endpoints), {})
                own.update({level.name: own.get(level.name, level) for level in levels})
        sweeps.append(PlannedSweep(sweep.title, sweep.measures, (*series, *endpoints), levels))
    runs = [
        ServerRun(0, method, k, tuple(levels.values()), gpus, () if endpoint else flags, endpoint)
        for (method, k, gpus, endpoint), levels in servers.items()
    ]
    runs.sort(key=lambda run: run.tensor_parallel)
    # What was not reached is named by what was: a published load may need more prompts than its data set has.
    return Plan(abba(runs, recipe.eval.repeats), tuple(dict.fromkeys(skipped)), True, tuple(sweeps))


def _folder() -> Traversable:
    return resources.files("drafthead.evaluation.measuring") / "experiments"


def _heldout(recipe: Recipe) -> set[tuple[str, str]] | None:
    """Source and category of the held-out prompts; None before they are made."""
    if not (recipe.prompts_dir / MANIFEST).exists():
        return None
    return {(prompt.source, prompt.category) for prompt in read_prompts(recipe.prompts_dir, "heldout")}


def _with_prompts(sweep: Sweep, there: set[tuple[str, str]] | None) -> tuple[Sweep, list[str]]:
    """The sweep with the workloads that the recipe has prompts for, and what to add for the others."""
    kept, missing = [], []
    for workload in sweep.workloads:
        if workload.random or there is None or any(workload.holds(*found) for found in there):
            kept.append(workload)
            continue
        wanted = f"category {workload.category}" if workload.category else f"source {workload.source}"
        count = workload.prompts or sweep.prompts_per_level * max(1, len(sweep.concurrency))
        missing.append(
            f"workload {workload.name}: the recipe holds out no prompts of {wanted}; add "
            f"{{name: {workload.source}, heldout: {count}}} to prompts.sources and make the prompts again"
        )
    return sweep.model_copy(update={"workloads": tuple(kept)}), missing


def _levels(recipe: Recipe, sweep: Sweep, small: Miniature | None, disjoint: bool) -> tuple[Level, ...]:
    levels = []
    for workload, temperature in product(sweep.workloads, sweep.temperatures):
        first = 0
        if small and temperature not in small.temperatures:
            continue
        for load in _loads(sweep, small):
            if workload.most_at_once and (load.concurrency or 0) > workload.most_at_once:
                continue
            count = workload.prompts or prompts_of_level(load, sweep.prompts_per_level, sweep.prompts_per_place)
            longest = workload.max_tokens or sweep.max_tokens or recipe.eval.max_tokens
            if small:
                count, longest = small.prompts_per_level, small.max_tokens
            spec = _shrunk(workload, small) if small else workload
            longest = spec.random[1] if spec.random else longest
            levels.append(Level(spec, load, count, longest, temperature, first))
            first += count if disjoint else 0
    return tuple(levels)


def _loads(sweep: Sweep, small: Miniature | None) -> list[LoadConfig]:
    loads = [
        *(LoadConfig(concurrency=c, request_rate=c if sweep.rate_is_concurrency else None) for c in sweep.concurrency),
        *sweep.loads,
    ]
    if small:
        loads = [
            load.model_copy(
                update={
                    "concurrency": min(load.concurrency or small.concurrency, small.concurrency),
                    "request_rate": load.request_rate and small.request_rate,
                }
            )
            for load in loads
        ]
    return list({load.name: load for load in loads}.values())


def _shrunk(workload: WorkloadSpec, small: Miniature) -> WorkloadSpec:
    if workload.random:
        lengths = tuple(max(4, length // small.random_divisor) for length in workload.random)
        return workload.model_copy(update={"random": lengths})
    return workload.model_copy(update={"source": None, "category": workload.miniature})


def _series(recipe: Recipe, sweep: Sweep, small: Miniature | None) -> tuple[list[tuple[str, int]], list[str]]:
    """(method, K) of every server, and what is left out with the reason."""
    series: list[tuple[str, int]] = []
    skipped = []
    for entry in sweep.methods:
        if entry.method == BASELINE:
            series.append((BASELINE, 0))
            continue
        drafting = HEAD if entry.method == "head" else entry.method
        if entry.model and entry.target != recipe.target.path:
            skipped.append(f"{entry.name}: {entry.model} drafts for {entry.target}, the target is {recipe.target.path}")
            continue
        names = [entry.name] if entry.model else [own.name for own in recipe.eval.methods if own.method == drafting]
        if missing := missing_package(drafting):
            skipped.append(f"{drafting}: {missing}")
            continue
        if not names and drafting in HEADS and drafting != HEAD:
            skipped.append(f"{drafting}: eval.methods has no head for it; {HEADS[drafting]}")
        for name in names or ([drafting] if drafting == HEAD or drafting not in HEADS else []):
            ks = entry.num_draft_tokens or recipe.eval.draft_tokens_of(method_of(recipe, name))
            if small:
                ks = tuple(k for k in ks if k <= small.most_draft_tokens)[:2] or (small.most_draft_tokens,)
            series += [(name, k) for k in ks]
    return list(dict.fromkeys(series)), skipped
