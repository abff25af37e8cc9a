"""Acceptance in process: how many draft tokens the target keeps, prompt by prompt, and whether text changes.

Each method and K is one engine, which answers the same prompts at every temperature and reasoning effort. The
greedy baseline responses twice, the second time in reverse order with an empty cache: in bf16 another batch
composition rounds differently, and what differs between those two is the floor under every statement about
losslessness. In-process engines give exact counters per request but say nothing about speed; that is
`drafthead.evaluation.measuring.serving`'s part.
"""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import groupby, product
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from drafthead.artifacts import begin, finish
from drafthead.config import Recipe
from drafthead.config.evaluation import Effort
from drafthead.data.responses import repeated_share
from drafthead.engine.offline import generate, import_vllm, offline_engine
from drafthead.evaluation.columns import ACCEPTANCE_COLUMNS
from drafthead.evaluation.workload import (
    BASELINE,
    BASELINE_AGAIN,
    SAMPLED,
    EvalPrompt,
    Workload,
    identity,
    load_workload,
    method_of,
    methods_at,
    speculative_config,
)
from drafthead.files import atomic_path
from drafthead.processes import end_with_pool
from drafthead.progress import progress_bar

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput


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
            return directory / f"arm-{self.method}.parquet"
        return directory / f"also-{self.method}-k{self.k}-t{self.temperature:g}-{self.effort}.parquet"


def conditions(recipe: Recipe) -> list[Condition]:
    """All of them, those that share an engine together, the baseline first."""
    settings, found = recipe.eval, []
    for method in _methods(recipe):
        ks = (0,) if method == BASELINE else settings.draft_tokens_of(method_of(recipe, method))
        temperatures = [t for t in settings.temperatures if t > 0 or method != SAMPLED]
        main = (ks[0], settings.temperatures[0], settings.reasoning_effort)
        grid = product(ks, temperatures, settings.reasoning_efforts)
        found += [Condition(method, *values, main=values == main) for values in grid]
    return found


def _methods(recipe: Recipe) -> tuple[str, ...]:
    listed = [method.name for method in recipe.eval.methods]
    return BASELINE, *methods_at(recipe, listed, max(recipe.eval.temperatures))


KIND = "acceptance"

Workloads = Mapping[Effort, Workload]


def measure_acceptance(recipe: Recipe) -> Path:
    """Measure every condition that is not on disk yet; returns the artifact's directory.

    Raises:
        ArtifactError: prompts or a head are missing, or the directory holds another measurement.
        ValueError: held-out prompts were trained on, or none fits.
    """
    directory = acceptance_dir(recipe)
    workloads = {effort: load_workload(recipe, effort) for effort in recipe.eval.reasoning_efforts}
    found, main = conditions(recipe), workloads[recipe.eval.reasoning_effort]
    made_from = identity(recipe, main, _methods(recipe)) | {
        "temperatures": list(recipe.eval.temperatures),
        "prompts_by_effort": {effort: workload.digest for effort, workload in workloads.items()},
        "seed": recipe.eval.seed,
    }
    if begin(directory, KIND, made_from, alone=True):
        return directory
    missing = [c for c in found if not c.path(directory).exists()]
    total, left = (sum(c.passes * len(workloads[c.effort].prompts) for c in some) for some in (found, missing))
    with progress_bar(total, "measuring acceptance", "response", initial=total - left) as bar:
        for _, same in groupby(missing, key=lambda c: (c.method, c.k)):  # one engine can answer them
            group = list(same)
            if not _poisons(recipe, group[0].method):
                _measure(recipe, directory, group, workloads, bar)
                continue
            with ProcessPoolExecutor(1, get_context("spawn"), end_with_pool) as process:
                process.submit(_measure, recipe, directory, group, workloads).result()
            bar.update(sum(len(workloads[c.effort].prompts) for c in group))
    counts = {"prompts": len(main.prompts), "too_long": main.too_long, "unrenderable": main.unrenderable}
    finish(directory, counts | {"arms": len({c.method for c in found}), "conditions": len(found)})
    return directory


def acceptance_dir(recipe: Recipe) -> Path:
    """Where the measurement lies; one at float32, for exact losslessness, has a folder of its own."""
    return recipe.results_dir / (KIND if recipe.target.dtype != "float32" else f"{KIND}-float32")


def read_acceptance(directory: Path) -> pd.DataFrame:
    """One row per request of the main conditions, the first of every list; see ACCEPTANCE_COLUMNS."""
    return _read(directory, "arm-*.parquet")


def read_conditions(directory: Path) -> pd.DataFrame:
    """One row per request of every condition; see ACCEPTANCE_COLUMNS."""
    return _read(directory, "arm-*.parquet", "also-*.parquet")


def _read(directory: Path, *patterns: str) -> pd.DataFrame:
    paths = [path for pattern in patterns for path in sorted(directory.glob(pattern))]
    return pd.concat([pd.read_parquet(path) for path in paths], ignore_index=True)


def _poisons(recipe: Recipe, method: str) -> bool:
    """Whether the method's engine leaves a process in which vLLM 0.32 cannot start another: n-gram imports numba."""
    return method != BASELINE and method_of(recipe, method).method == "ngram"


def _measure(recipe: Recipe, directory: Path, group: list[Condition], workloads: Workloads, bar: Any = None) -> None:
    """Every condition of one engine; a file per condition."""
    method, k = group[0].method, group[0].k
    speculative = speculative_config(recipe, method, k)
    # vLLM refuses the option without speculation.
    options: dict[str, Any] = {"per_request_spec_decode_metrics": "detailed"} if speculative else {}
    seeded = any(c.temperature > 0 for c in group)
    with offline_engine(recipe, speculative_config=speculative, seeded=seeded, **options) as llm:
        for condition in group:
            prompts = workloads[condition.effort].prompts
            llm.reset_prefix_cache()
            rows = _generate(llm, recipe, condition, method, prompts, bar)
            if condition.passes == 2:
                llm.reset_prefix_cache()
                rows += _generate(llm, recipe, condition, BASELINE_AGAIN, prompts[::-1], bar)
            with atomic_path(condition.path(directory)) as temporary:
                pd.DataFrame(rows, columns=list(ACCEPTANCE_COLUMNS)).to_parquet(temporary, index=False)


def _generate(
    llm: "LLM", recipe: Recipe, condition: Condition, method: str, prompts: list[EvalPrompt], bar: Any
) -> list[dict[str, Any]]:
    sampling = import_vllm().SamplingParams
    options: dict[str, Any] = {"max_tokens": recipe.eval.max_tokens, "detokenize": False}
    if condition.temperature == 0:
        params = sampling(temperature=0, **options)
    else:  # a seed per prompt: the same draw whatever the batch
        seeds = range(recipe.eval.seed, recipe.eval.seed + len(prompts))
        params = [sampling(temperature=condition.temperature, seed=seed, **options) for seed in seeds]
    outputs = generate(llm, [p.prompt_ids for p in prompts], params, bar)
    key = {"arm": method, "k": condition.k, "temperature": condition.temperature, "effort": condition.effort}
    return [key | _row(p, output, condition.k) for p, output in zip(prompts, outputs, strict=True)]


def _row(prompt: EvalPrompt, output: "RequestOutput", K: int) -> dict[str, Any]:
    response = output.outputs[0]
    ids = list(response.token_ids)
    counters = response.spec_decode_metrics
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
        "reached_at": [int(((kept >= k) & (drafted > k)).sum()) for k in range(K)],
        "finish_reason": response.finish_reason,
        "repeated": repeated_share(ids),
    }
