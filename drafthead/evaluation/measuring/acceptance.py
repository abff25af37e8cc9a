"""Acceptance in process: how many draft tokens the target keeps, prompt by prompt, and whether text changes.

Each method and K is one engine, which answers the same prompts at every temperature and reasoning effort. The
greedy baseline responses twice, the second time in reverse order with an empty cache: in bf16 another batch
composition rounds differently, and what differs between those two is the floor under every statement about
losslessness. In-process engines give exact counters per request but say nothing about speed; that is
`drafthead.evaluation.measuring.serving`'s part.

On several engines at once (drafthead.engine.running) each method's prompts are dealt out, to as many engines as its
share of the passes allows: with 8 engines, 4 for a greedy baseline and 2 for each of two methods.
"""

import hashlib
import logging
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from drafthead.artifacts import MANIFEST, SCHEMA_VERSION, ArtifactError, begin, finish, made_by, read_manifest
from drafthead.config import Recipe
from drafthead.config.evaluation import SEED, Effort
from drafthead.data.responses import repeated_share
from drafthead.engine.generate import Engine, Generation, GenerationRequest
from drafthead.engine.offline import offline_engine
from drafthead.engine.running import Task, run_here, run_on_node
from drafthead.evaluation.columns import ACCEPTANCE_COLUMNS, read_rows, write_rows
from drafthead.evaluation.workload import (
    BASELINE,
    SAMPLED,
    EvalPrompt,
    Workload,
    identity,
    load_workload,
    method_of,
    methods_at,
    speculative_config,
)
from drafthead.files import atomic_path, sha256_file
from drafthead.processes import ends_with_parent

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Condition:
    """One measurement over all prompts.

    Attributes:
        method: by name.
        k: draft tokens; 0 for the baseline.
        temperature, effort: of the responses.
        main: the first of every list of the recipe, which the report shows.
    """

    method: str
    k: int
    temperature: float
    effort: Effort
    main: bool

    @property
    def passes(self) -> int:
        """How often the prompts are answered: the greedy baseline does it twice."""
        return 1 + (self.method == BASELINE and self.temperature == 0)

    def path(self, directory: Path) -> Path:
        """The file of its rows."""
        if self.main:
            return directory / f"method-{self.method}.parquet"
        return directory / f"also-{self.method}-k{self.k}-t{self.temperature:g}-{self.effort}.parquet"


def conditions(recipe: Recipe) -> list[Condition]:
    """All of them, those that share an engine together, the baseline first."""
    settings, found = recipe.eval, []
    listed = [method.name for method in settings.methods]
    for method in (BASELINE, *methods_at(recipe, listed, max(settings.temperatures))):
        ks = (0,) if method == BASELINE else settings.draft_tokens_of(method_of(recipe, method))
        temperatures = [t for t in settings.temperatures if t > 0 or method != SAMPLED]
        main = (ks[0], settings.temperatures[0], settings.reasoning_effort)
        grid = product(ks, temperatures, settings.reasoning_efforts)
        found += [Condition(method, *values, main=values == main) for values in grid]
    return found


KIND = "acceptance"

Workloads = Mapping[Effort, Workload]


def measure_acceptance(recipe: Recipe, workers: int = 1) -> Path:
    """Measure every condition that is not on disk yet; returns the artifact's directory.

    Args:
        recipe: target, engine, head and eval sections are used.
        workers: engines that run at once.

    Raises:
        ArtifactError: prompts or a head are missing, or the directory holds another measurement.
        ValueError: held-out prompts were trained on, or none fits.
    """
    directory = recipe.results_dir / KIND
    workloads = {effort: load_workload(recipe, effort) for effort in recipe.eval.reasoning_efforts}
    found, main = conditions(recipe), workloads[recipe.eval.reasoning_effort]
    methods = list(dict.fromkeys(c.method for c in found))
    made_from = identity(recipe, main, methods) | {
        "temperatures": list(recipe.eval.temperatures),
        "prompts_by_effort": {effort: workload.digest for effort, workload in workloads.items()},
        "seed": SEED,
    }
    if begin(directory, KIND, made_from, alone=True):
        return directory
    _take_baseline([c.path(directory) for c in found if c.method == BASELINE], made_from, directory)
    missing = [c for c in found if not c.path(directory).exists()]
    jobs = _shared(directory, missing, workloads, workers)
    run = run_here if workers == 1 else partial(run_on_node, workers=workers)
    start: Any = partial(nullcontext, _Measuring(recipe, workloads, workers == 1))
    if unmeasured := [job for job in jobs if not job.path.exists()]:
        run(Task(start, recipe.engine.tensor_parallel_size, "measuring acceptance", "response"), unmeasured)
    for condition in missing:
        parts = [pd.read_parquet(condition.path(job.directory)) for job in jobs if condition in job.conditions]
        write_rows(pd.concat(parts).sort_index().reset_index(drop=True), condition.path(directory))
    for left in directory.glob("part-*"):
        shutil.rmtree(left)
    counts = {"prompts": len(main.prompts), "too_long": main.too_long, "unrenderable": main.unrenderable}
    finish(directory, counts | {"methods": len(methods), "conditions": len(found)})
    return directory


_OF_DRAFTS = {"head", "methods", "num_draft_tokens"}  # of an identity: what the baseline does not depend on


def _take_baseline(paths: Sequence[Path], made_from: dict[str, Any], directory: Path) -> None:
    """Copy the baseline's rows from another recipe's finished measurement of the same prompts, target and settings on
    this machine: to compare heads on one store, the target answers once."""
    here, wanted = made_by(), {"kind": KIND, "schema_version": SCHEMA_VERSION, **made_from}
    for other in sorted(directory.parents[1].glob(f"*/{directory.name}/{MANIFEST}")):
        with suppress(ArtifactError, OSError):  # damaged or being deleted: it is measured here
            manifest = read_manifest(other.parent)
            found, by = manifest["identity"], manifest.get("made_by", {})
            alike = all(found.get(key) == wanted.get(key) for key in {*found, *wanted} - _OF_DRAFTS)
            if not alike or any(by.get(key) != here[key] for key in ("machine", "versions")):
                continue
            for path in (path for path in paths if not path.exists() and path.name in manifest["files"]):
                source = other.with_name(path.name)
                if sha256_file(source) == manifest["files"][path.name]["sha256"]:
                    with atomic_path(path) as temporary:
                        shutil.copyfile(source, temporary)
                    _LOG.info("the baseline's rows are those of %s: %s", other.parent, path.name)


@dataclass(frozen=True)
class _Share:
    """A unit of work: every `of`-th prompt under the conditions of one engine; a file per condition.

    The index of its rows says where one engine would have put them.

    Attributes:
        conditions: of one method at one K.
        directory: of the files.
        first, of: the prompts, which are `prompts[first::of]`.
        size: responses.
    """

    conditions: list[Condition]
    directory: Path
    first: int
    of: int
    size: int

    @property
    def path(self) -> Path:
        """The file that is written last."""
        return self.conditions[-1].path(self.directory)


def _shared(directory: Path, missing: list[Condition], workloads: Workloads, workers: int) -> list[_Share]:
    """The work, in as many shares of about one length as there are engines, and one or more of each method and K."""
    passes, jobs = sum(c.passes for c in missing), []
    for _, found in groupby(missing, key=lambda c: (c.method, c.k)):
        group = list(found)
        of = max(1, workers * sum(c.passes for c in group) // passes)
        for first in range(of):
            folder = directory / f"part-{first + 1}-of-{of}"
            folder.mkdir(exist_ok=True)
            if size := sum(c.passes * len(workloads[c.effort].prompts[first::of]) for c in group):
                jobs.append(_Share(group, folder, first, of, size))
    return jobs


def read_acceptance(directory: Path) -> pd.DataFrame:
    """One row per request of the main conditions, the first of every list; see ACCEPTANCE_COLUMNS."""
    return read_rows(directory, "method-*.parquet")


def read_conditions(directory: Path) -> pd.DataFrame:
    """One row per request of every condition; see ACCEPTANCE_COLUMNS."""
    return read_rows(directory, "method-*.parquet", "also-*.parquet")


@dataclass(frozen=True)
class _Measuring:
    """A worker that starts an engine for every share; in a process of its own where the next could not start in this.

    Attributes:
        recipe, workloads: what is measured.
        alone: no other worker runs. Engines of several workers live in their worker's process, so on a GPU it must end
            before all memory is free again.
    """

    recipe: Recipe
    workloads: Workloads
    alone: bool

    def make(self, share: _Share, bar: Any) -> None:
        """Measure a share."""
        method = share.conditions[0].method
        # N-gram imports numba and so leaves a process in which vLLM 0.32 cannot start another engine.
        ngram = method != BASELINE and method_of(self.recipe, method).method == "ngram"
        if self.alone and not ngram:
            _measure(self.recipe, share, self.workloads, bar)
            return
        with ProcessPoolExecutor(1, get_context("spawn"), ends_with_parent()) as process:
            process.submit(_measure, self.recipe, share, self.workloads).result()
        bar.update(share.size)

    def finish(self) -> None:
        """Nothing is on its way to disk."""


def _measure(recipe: Recipe, share: _Share, workloads: Workloads, bar: Any = None) -> None:
    """Every condition of one engine; a file per condition."""
    method, k = share.conditions[0].method, share.conditions[0].k
    speculative = speculative_config(recipe, method, k)
    # vLLM refuses the option without speculation.
    options: dict[str, Any] = {"per_request_spec_decode_metrics": "detailed"} if speculative else {}
    seeded = any(c.temperature > 0 for c in share.conditions)
    with offline_engine(recipe, speculative_config=speculative, seeded=seeded, **options) as llm:
        engine = Engine(llm)
        for condition in share.conditions:
            path, prompts = condition.path(share.directory), workloads[condition.effort].prompts
            if path.exists():
                continue
            mine = list(enumerate(prompts))[share.first :: share.of]
            places = [number for number, _ in mine]
            engine.reset_cache()
            rows = _generate(engine, recipe, condition, mine, bar)
            if condition.passes == 2:
                engine.reset_cache()
                rows += [row | {"again": True} for row in _generate(engine, recipe, condition, mine[::-1], bar)]
                places += [2 * len(prompts) - 1 - number for number, _ in mine[::-1]]
            write_rows(pd.DataFrame(rows, pd.Index(places), columns=list(ACCEPTANCE_COLUMNS)), path)


def _generate(
    engine: Engine, recipe: Recipe, condition: Condition, numbered: list[tuple[int, EvalPrompt]], bar: Any
) -> list[dict[str, Any]]:
    temperature, most = condition.temperature, recipe.eval.max_tokens
    requests = [  # a seed per prompt: the same draw whatever the batch
        GenerationRequest(prompt.prompt_ids, most, temperature, SEED + number if temperature else None)
        for number, prompt in numbered
    ]
    generations = engine.generate(requests, bar)
    key = {"method": condition.method, "again": False, "k": condition.k, "temperature": temperature}
    key["effort"] = condition.effort
    return [key | _row(p, one, condition.k) for (_, p), one in zip(numbered, generations, strict=True)]


def _row(prompt: EvalPrompt, response: Generation, K: int) -> dict[str, Any]:
    ids, counters = response.token_ids, response.counters
    kept = np.array(counters.per_step_accepted if counters else [], int)  # (steps,)
    drafted = np.array(counters.per_step_drafted if counters else [], int)
    return {
        "prompt_id": prompt.id,
        "source": prompt.source,
        "category": prompt.category,
        "prompt_tokens": len(prompt.prompt_ids),
        "output_ids": ids,
        "output_sha256": hashlib.sha256(repr(ids).encode()).hexdigest(),
        "num_tokens": len(ids),
        "drafts": len(kept),
        "proposed": int(drafted.sum()),
        "accepted": int(kept.sum()),
        "accepted_at": [int((kept > k).sum()) for k in range(K)],
        "accepted_by_step": kept.tolist(),
        "reached_at": [int(((kept >= k) & (drafted > k)).sum()) for k in range(K)],
        "finish_reason": response.finish_reason,
        "repeated": repeated_share(ids),
    }
