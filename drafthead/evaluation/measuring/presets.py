"""Published experiments as data: one word repeats one of them on the recipe's target and heads.

A preset says which workloads, methods, K, loads and server flags an experiment used, table by table; what it published
is in docs/published.yaml. `miniature` shrinks it to the embedded recipe, where every code path but the size is the
same.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from drafthead.artifacts import MANIFEST
from drafthead.config import Recipe
from drafthead.config.evaluation import HEAD, HEADS, Method, MethodConfig
from drafthead.data.prompts import read_prompts
from drafthead.drafters.config import ParallelHead
from drafthead.evaluation.columns import LevelKey
from drafthead.evaluation.measuring.plan import (
    PlannedLoad,
    PlannedSweep,
    ServePlan,
    ServerRun,
    Sweep,
    WorkloadSpec,
    abba,
)
from drafthead.evaluation.workload import BASELINE, method_of, missing_requirement, where_to_add_prompts
from drafthead.section import Section

_FOLDER = Path(__file__).with_name("experiments")
_EVERY = 1_000_000  # held-out prompts: all of a source's


class PresetMethod(Section):
    """Every entry of eval.methods that drafts with this method, at these Ks; for HEAD of other EAGLE-3 heads, too.

    With `model` the entry is a public draft model, served where the recipe's target is `target`.
    """

    method: Method
    num_draft_tokens: tuple[int, ...] = ()
    name: str = ""
    model: str = ""
    target: str = ""
    extra: dict[str, Any] = Field(default_factory=dict)


class PresetSweep(Sweep):
    """One table of the post."""

    methods: tuple[PresetMethod, ...]  # beside the baseline
    tensor_parallel: tuple[int, ...] = ()  # none: the recipe's
    measures: tuple[str, ...]
    endpoints: bool = False  # the recipe's endpoints beside the servers started here

    def miniature(self, most_draft_tokens: int) -> "PresetSweep":
        """The same at the size of the embedded target: few places, prompts and tokens, one device."""
        loads = {}
        for load in self.loads:
            fewer = {"concurrency": min(load.concurrency or 2, 2), "request_rate": load.request_rate and 20.0}
            small = load.model_copy(update=fewer)
            loads[small.name] = small
        workloads = map(_miniature, self.workloads)
        methods = []
        for method in self.methods:
            few = tuple(k for k in method.num_draft_tokens if k <= most_draft_tokens)[:2] or (most_draft_tokens,)
            methods.append(method.model_copy(update={"num_draft_tokens": few if method.num_draft_tokens else ()}))
        return self.model_copy(
            update={
                "workloads": tuple(workloads), "methods": tuple(methods), "loads": tuple(loads.values()),
                "temperatures": tuple(t for t in self.temperatures if t in (0.0, 0.5)) or self.temperatures,
                "prompts_per_level": 4, "prompts_per_place": 0, "max_tokens": 16,
            }
        )  # fmt: skip


def _miniature(workload: WorkloadSpec) -> WorkloadSpec:
    lengths = workload.random and tuple(max(4, length // 64) for length in workload.random)
    own = {"category": workload.miniature, "random": lengths, "parts": tuple(map(_miniature, workload.parts))}
    return workload.model_copy(update=own | dict.fromkeys(("source", "prompts", "max_tokens")))


class Preset(Section):
    """One published experiment."""

    title: str
    note: str  # what to know before comparing
    sweeps: tuple[PresetSweep, ...]
    flags: tuple[str, ...] = ()
    tpot_limits_ms: tuple[float, ...] = ()  # service levels to recommend a method for
    miniature_flags: tuple[str, ...] = ()
    miniature_draft_tokens: int = 3  # at most


def preset_names() -> list[str]:
    """Those that ship."""
    return sorted(path.stem for path in _FOLDER.glob("*.yaml"))


def load_preset(name: str) -> Preset:
    """Read one of `preset_names`."""
    return Preset.model_validate(yaml.safe_load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8")))


def public_methods(recipe: Recipe, preset: Preset) -> tuple[MethodConfig, ...]:
    """The public draft models of the preset that are made for the recipe's target, but for names that it has itself."""
    listed = {method.name for method in recipe.eval.methods}
    found = {
        entry.name: MethodConfig(name=entry.name, method=entry.method, head=entry.model, extra=entry.extra)
        for sweep in preset.sweeps
        for entry in sweep.methods
        if entry.model and entry.target == recipe.target.path and entry.name not in listed
    }
    return tuple(found.values())


def preset_plan(recipe: Recipe, preset: Preset, miniature: bool = False) -> ServePlan:
    """The preset's servers and levels on the recipe's target, and the tables of its report.

    A server is started once, whatever the number of tables it stands in.

    Args:
        recipe: target, methods, endpoints, repeats and longest response.
        preset: the experiment.
        miniature: at the size of the embedded target, on one device.
    """
    added = public_methods(recipe, preset)
    flags = preset.miniature_flags if miniature else preset.flags
    servers: dict[tuple[str, int, int, bool], dict[str, PlannedLoad]] = {}
    sweeps, skipped = [], []
    missing: dict[WorkloadSpec, int] = {}
    for published in preset.sweeps:
        sweep = published.miniature(preset.miniature_draft_tokens) if miniature else published
        if not miniature:
            sweep, without = _with_prompts(sweep, recipe)
            missing |= {w: max(count, missing.get(w, 0)) for w, count in without.items()}
        if not sweep.workloads:
            continue
        levels = sweep.levels(recipe)
        series, left_out = _series(recipe, sweep, added)
        skipped += left_out
        parallel = sweep.tensor_parallel or (recipe.engine.tensor_parallel_size,)
        if miniature and max(parallel) > 1:
            skipped.append(f"tensor parallelism {max(parallel)}: a miniature runs on one device")
            parallel = (1,)
        endpoints = [(endpoint.name, 0) for endpoint in recipe.eval.endpoints] if sweep.endpoints else []
        if sweep.endpoints and not endpoints:
            skipped.append("other engines: name them in eval.endpoints (name, url, model)")
        keys: set[LevelKey] = set()
        for gpus, (method, k) in product(parallel, (*series, *endpoints)):
            own = servers.setdefault((method, k, gpus, (method, k) in endpoints), {})
            own.update({level.name: own.get(level.name, level) for level in levels})
            run = ServerRun(0, method, k, levels, gpus)
            keys.update(map(run.key, levels))
        sweeps.append(PlannedSweep(sweep.title, sweep.measures, frozenset(keys)))
    runs = [
        ServerRun(0, method, k, tuple(levels.values()), gpus, () if endpoint else flags, endpoint)
        for (method, k, gpus, endpoint), levels in servers.items()
    ]
    runs.sort(key=lambda run: run.tensor_parallel)
    if missing:
        names, wanted = (", ".join(x) for x in ((w.name for w in missing), dict.fromkeys(w.wanted for w in missing)))
        most = {w.source: max(n for other, n in missing.items() if other.source == w.source) for w in missing}
        entries = ", ".join(f"{{name: {source}, heldout: {count}}}" for source, count in most.items())
        where = where_to_add_prompts(recipe)
        skipped.insert(0, f"workload {names}: the recipe holds out no prompts of {wanted}; add {entries} to {where}")
    return ServePlan(abba(runs, recipe.eval.repeats), tuple(dict.fromkeys(skipped)), tuple(sweeps), added)


def _with_prompts(sweep: PresetSweep, recipe: Recipe) -> tuple[PresetSweep, dict[WorkloadSpec, int]]:
    """The sweep with the workloads that the recipe has prompts for, and how many of a source the others need."""
    if (recipe.prompts_dir / MANIFEST).exists():
        there = {(prompt.source, prompt.category) for prompt in read_prompts(recipe.prompts_dir, "heldout")}
    elif recipe.prompts.sources is None:  # what a file holds is known once it is read
        return sweep, {}
    else:  # a source may have any category
        named = {source.name for source in recipe.prompts.sources if source.heldout}
        single = [part for w in sweep.workloads for part in w.parts or (w,)]
        there = {(name, w.category or "") for w in single for name in named if w.source in (None, name)}

    def has(workload: WorkloadSpec) -> bool:
        return workload.random is not None or any(workload.holds(*found) for found in there)

    def without_missing(workload: WorkloadSpec) -> WorkloadSpec:
        parts = tuple(filter(has, workload.parts))
        name = workload.name if parts == workload.parts else f"{workload.name}-{len(parts)}-of-{len(workload.parts)}"
        return workload.model_copy(update={"parts": parts, "name": name})

    kept = tuple(map(without_missing, filter(has, sweep.workloads)))
    missing = {
        # A category gets its share of what is drawn evenly from all of them: it needs the whole source.
        x.workload: _EVERY if x.workload.category else x.first + x.prompts
        for x in sorted(sweep.levels(recipe), key=lambda x: x.first + x.prompts)
        if x.workload not in kept and not x.workload.parts  # of which other tables have each alone
    }
    return sweep.model_copy(update={"workloads": kept}), missing


def _series(
    recipe: Recipe, sweep: PresetSweep, added: Sequence[MethodConfig]
) -> tuple[list[tuple[str, int]], list[str]]:
    """(method, K) of every server, and what is left out with the reason."""
    series: list[tuple[str, int]] = [(BASELINE, 0)]
    skipped = []
    public = {entry.name for entry in sweep.methods if entry.model and entry.target == recipe.target.path}
    for entry in sweep.methods:
        # Public heads are served at the Ks of their own entries.
        alike = (HEAD, "eagle3") if entry.method == HEAD else (entry.method,)
        names = [other.name for other in recipe.eval.methods if other.method in alike and other.name not in public]
        if entry.model and entry.target != recipe.target.path:
            skipped.append(f"{entry.name}: {entry.model} drafts for {entry.target}, the target is {recipe.target.path}")
        elif not names and not entry.model and entry.method in HEADS:
            skipped.append(f"{entry.method}: eval.methods has no head for it; {HEADS[entry.method]}")
        else:
            for name in [entry.name] if entry.model else names or [entry.method]:
                settings = method_of(recipe, name, added)
                missing = missing_requirement(recipe, settings)
                skipped += [f"{name}: {missing}"] if missing else []
                ks = entry.num_draft_tokens or recipe.eval.draft_tokens_of(settings)
                # A head that fills several positions in one pass has none beyond those that it was trained for.
                most = recipe.head.num_positions if name == HEAD and isinstance(recipe.head, ParallelHead) else max(ks)
                skipped += [f"{name}: K = {k}: it was trained for {most}" for k in ks if k > most]
                series += [(name, k) for k in ks if k <= most and not missing]
    return list(dict.fromkeys(series)), skipped
