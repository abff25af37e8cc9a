"""Which prompts a level sends: the same ones to every method, in an order that mixes categories."""

import hashlib

import numpy as np
import pandas as pd

from drafthead.config import Recipe
from drafthead.engine.load import LoadRequest
from drafthead.evaluation.measuring.plan import Level, Plan, WorkloadSpec
from drafthead.evaluation.workload import Workload
from drafthead.target.tokenizer import load_tokenizer


def plan_prompts(recipe: Recipe, plan: Plan, workload: Workload) -> dict[Level, list[LoadRequest]]:
    """Level -> what it sends, for every level of the plan.

    Raises:
        ValueError: a workload has no prompts, or too few for levels that share none, or a level has fewer prompts than
            places and the plan does not allow it.
    """
    levels = list(dict.fromkeys(level for run in plan.runs for level in run.levels))
    pools = {spec: _pool(recipe, workload, spec) for spec in {level.workload for level in levels}}
    found = {}
    for level in levels:
        pool = pools[level.workload] or _random_prompts(recipe, level)
        last = level.first + level.prompts
        if level.first and last > len(pool):
            raise ValueError(
                f"levels that share no prompt need {last} of {level.workload.name}, the recipe has {len(pool)}: hold "
                "out more of that source"
            )
        found[level] = pool[level.first : last]
        places = level.load.concurrency or 1
        if len(found[level]) < places and not plan.allow_unreached:
            raise ValueError(
                f"{places} at once cannot be reached with {len(found[level])} prompts of {level.workload.name}: raise "
                "prompts.max_heldout, lower eval.concurrency, or set eval.allow_unreached=true to measure the "
                "level and have it named by what was reached"
            )
    return found


def _pool(recipe: Recipe, workload: Workload, spec: WorkloadSpec) -> list[LoadRequest]:
    """An even draw over categories in a fixed order; empty for random tokens, which are made per level."""
    if spec.random:
        return []
    prompts = [p for p in workload.prompts if spec.source in (None, p.source) and spec.category in (None, p.category)]
    if not prompts:
        wanted = f"source {spec.source}" if spec.source else f"category {spec.category}"
        there = sorted({f"{p.source}/{p.category}" for p in workload.prompts})
        raise ValueError(
            f"workload {spec.name} needs held-out prompts of {wanted}; the recipe has {', '.join(there)} "
            "(source/category): add the source to prompts.sources with heldout prompts, see docs/prompts.md"
        )
    shuffled = pd.DataFrame({"category": [p.category for p in prompts]}).sample(frac=1, random_state=recipe.eval.seed)
    turn = shuffled.groupby("category").cumcount()  # first of each category, then second of each …
    order = turn.sort_values(kind="stable").index
    return [LoadRequest(prompts[i].id, prompts[i].prompt_ids) for i in order]


def _random_prompts(recipe: Recipe, level: Level) -> list[LoadRequest]:
    """Ordinary tokens drawn evenly; the same ones for the same workload and seed."""
    assert level.workload.random is not None
    length, longest = level.workload.random
    room = recipe.engine.max_model_len
    if length + longest >= room:
        raise ValueError(
            f"{level.workload.name} takes {length} + {longest} tokens, engine.max_model_len is {room}: raise it"
        )
    tokenizer = load_tokenizer(recipe)
    ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.all_special_ids)
    digest = hashlib.sha256(level.workload.name.encode()).digest()
    rng = np.random.default_rng([recipe.eval.seed, int.from_bytes(digest[:4])])
    drawn = rng.choice(ordinary, (level.first + level.prompts, length))
    return [LoadRequest(f"{level.workload.name}-{i}", row.tolist()) for i, row in enumerate(drawn)]
