"""Run the target over its own text and store its hidden states at every position.

A sequence is prompt, response and continuation; the loss mask is 1 on the response only. The work is cut into shards
(generation.shards), which one engine makes in this process, many on a Ray cluster (generation.cluster), or independent
processes that take a share each. With states.one_pass the shards were captured while the target generated, and only
what is missing is made. Several processes may begin and finish a store at the same time: they write the same, and each
file appears whole or not at all.

Online mode (states.spool_shards): the validation split is harvested into an ordinary store, then the spool of the
training split is kept full until training has all it needs. Shards follow in the order in which training reads them,
through all epochs. Where nothing fits, the harvester waits for the trainer; where the trainer is ahead, it waits for
the harvester. What to write next is read off the spool each time, so a restart needs no state of its own. Given up: the
engine holds its memory while it waits, so harvester and trainer want devices of their own.
"""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from drafthead.artifacts import IDENTITY, MANIFEST, ArtifactError, begin, finish, read_json, reference, require
from drafthead.config import Recipe
from drafthead.data.responses import KIND as RESPONSES
from drafthead.data.shard import Shard
from drafthead.data.spool import KIND as SPOOL
from drafthead.data.spool import Demand, Spool, open_spool, terms
from drafthead.data.store import KIND, verify_shard, verify_store
from drafthead.engine.capture.capturing import check_written_states, harvest_engine
from drafthead.engine.offline import generate
from drafthead.generation.running import Runner, Task, Worker, run_here, unwritten
from drafthead.generation.shards import WHOLE, ShardJob, list_jobs, move_captured, states_identity, to_do
from drafthead.progress import progress_bar, wait_until
from drafthead.target.pieces import TargetSpec, check_aux_layer_ids, load_target_spec, target_names

if TYPE_CHECKING:
    from vllm import LLM

logger = logging.getLogger(__name__)

SPLITS = ("train", "validation")
_MAKE_RESPONSES = "python data_gen/regenerate.py RECIPE"
_MIN_AGREEMENT = 0.9  # of the T = 0 text; what is missing are near ties between two tokens


def harvest(recipe: Recipe, share: slice = WHOLE, run: Runner = run_here) -> bool:
    """Make the states of both splits; finished shards are kept, and no model is loaded when all are.

    Args:
        recipe: target, engine and states sections are used.
        share: make these shards only. The process that finds all shards of a split finishes it.
        run: makes the shards.

    Returns:
        Whether both splits are finished; False when shards of other shares are missing.

    Raises:
        ArtifactError: responses are missing or come from another target, or a directory holds something else.
        FileNotFoundError: the target is missing.
        ValueError: an aux layer lies beyond the target, a sequence is too long, or a shard could not be written.
    """
    spec, online = load_target_spec(recipe.target_path, recipe.target.revision), recipe.states.spool_shards is not None
    check_aux_layer_ids(spec, recipe.target.aux_layer_ids)
    if online and (run is not run_here or share != WHOLE):
        raise ValueError(
            f"states.spool_shards {recipe.states.spool_shards}: one engine fills a spool, in the order in which "
            "training reads it; leave out --cluster, --workers and --shards, or harvest the whole store without a spool"
        )
    unfinished = [split for split in SPLITS if not claim(recipe, spec, split)]
    jobs = {split: list_jobs(recipe, split) for split in unfinished if split == "validation" or not online}
    if recipe.states.one_pass:
        for split in jobs:
            move_captured(recipe, spec, split, jobs[split])
    if missing := to_do([job for split in jobs for job in jobs[split][share]]):
        started = time.monotonic()
        run(harvesting(recipe, spec), missing)
        tokens = sum(job.num_tokens for job in missing)
        rate = tokens / (time.monotonic() - started)
        logger.info("harvested %s tokens at %s tokens/s, start included", f"{tokens:,}", f"{rate:,.0f}")
    finished = [_finish_if_whole(jobs[split], split) for split in jobs]
    if online:
        _harvest_online(recipe, spec)
    return all(finished)


def claim(recipe: Recipe, spec: TargetSpec, split: str) -> bool:
    """Check a split's responses and claim the directory of its states; True when they are complete.

    Raises:
        ArtifactError: responses are missing or come from another target, or the directory holds something else.
    """
    responses = require(recipe.responses_dir(split), RESPONSES, _MAKE_RESPONSES, every_byte=True)
    made_by, target = target_names(responses["identity"]["target"], recipe, spec)
    if made_by != target:
        raise ArtifactError(
            f"{recipe.responses_dir(split)} was generated by {made_by}, but target.path is {target}: the text would "
            f"not be the target's own; delete the responses and run: {_MAKE_RESPONSES}"
        )
    identity = {"responses": reference(responses), **states_identity(recipe, spec)}
    if split == "train" and recipe.states.spool_shards is not None:
        return begin(recipe.states_dir(split), SPOOL, identity | terms(recipe))
    return begin(recipe.states_dir(split), KIND, identity)


def _finish_if_whole(jobs: Sequence[ShardJob], split: str) -> bool:
    """Check a store and write its manifest, unless shards are missing, which other processes make.

    Raises:
        ArtifactError: the states do not lead to the target's own text.
    """
    if lacking := unwritten(jobs):
        logger.info(
            "%-10s %d of %d shards exist; the process that writes the last one finishes the store, or the command "
            "without --shards",
            *(split, len(jobs) - len(lacking), len(jobs)),
        )
        return False
    directory, counts, agreement = jobs[0].directory, _counts(jobs), argmax_agreement(jobs)
    if agreement is not None and agreement < _MIN_AGREEMENT:
        raise ArtifactError(
            f"the states in {directory} do not lead to the target's own text: its argmax is the next token at only "
            f"{agreement:.1%} of the T = 0 positions; the engine read another checkpoint or captured other rows. "
            f"Delete {directory} and compare with states.backend=transformers"
        )
    density = sum(job.path.stat().st_size for job in jobs) / counts["tokens"]
    finish(directory, counts | {"shards": len(jobs), "bytes_per_token": density, "argmax_agreement": agreement})
    return True


def _counts(jobs: Sequence[ShardJob]) -> dict[str, int]:
    return {
        "sequences": sum(job.size for job in jobs),
        "tokens": sum(job.num_tokens for job in jobs),
        "loss_tokens": sum(len(response.response_ids) for job in jobs for response in job.responses),
    }


def argmax_agreement(jobs: Sequence[ShardJob]) -> float | None:
    """Share of greedily generated tokens that the harvested states predict; None where nothing was greedy.

    Row t predicts token t + 1, so of a sequence  p0 p1 r2 r3  (p prompt, r response) rows 1 and 2 are compared.
    """
    agreed = total = 0
    for job in jobs:
        shard = Shard(job.path)
        for i, response in enumerate(job.responses):
            if response.temperature == 0:
                sequence = shard[i]
                following = sequence.input_ids[sequence.first_teacher_row + 1 :]
                in_loss = sequence.loss_mask[sequence.first_teacher_row + 1 :].bool()
                agreed += int((sequence.argmax[:-1] == following)[in_loss].sum())
                total += int(in_loss.sum())
    return agreed / total if total else None


# ---- Online mode ----


def _harvest_online(recipe: Recipe, spec: TargetSpec) -> None:
    """Fill the spool of the training split until nothing is left to write.

    Raises:
        ArtifactError: a shard in the spool is damaged or holds other sequences.
        InUseError: another harvester fills it.
    """
    jobs = list_jobs(recipe, "train")
    spool = open_spool(recipe, sum(job.size for job in jobs))
    with spool.filling():
        to_do([_job(jobs, index) for index in sorted(spool.present())])  # raises if one is damaged
        if not spool.demand().done:
            (spool.directory / MANIFEST).unlink(missing_ok=True)
            with backend(recipe, spec) as harvester:
                fill(harvester, spool, jobs)
        if spool.first_needed() == spool.total:
            spool.release(spool.total)  # training ended while the last shard was on its way
    if not (spool.directory / MANIFEST).exists():
        finish(spool.directory, _counts(jobs) | {"shards": spool.total, "epochs": spool.epochs}, lasting=False)


def fill(harvester: Worker, spool: Spool, jobs: Sequence[ShardJob]) -> None:
    """Write what the spool demands until it demands nothing more.

    While one shard goes to disk the next is computed, if the spool has room for both.

    Args:
        harvester: a running backend.
        spool: claimed by this process.
        jobs: the shards of one epoch.
    """
    began, waited = time.monotonic(), 0.0
    in_flight: int | None = None
    done = sum(_job(jobs, index).size for index in {*range(spool.first_needed()), *spool.present()})
    wait = (
        f"training to use up a shard of {spool.directory}, which has its {spool.capacity}; if it is not running: "
        "accelerate launch train/eagle3.py RECIPE"
    )
    with progress_bar(spool.epochs * sum(job.size for job in jobs), "harvesting", "seq", initial=done) as bar:
        while not (demand := spool.demand(in_flight)).done:
            if demand.index is None:
                harvester.finish()
                in_flight = None
                waited += wait_until(lambda: spool.demand() != Demand(index=None, done=False), wait)
            else:
                harvester.make(_job(jobs, demand.index), bar)
                in_flight = demand.index
        harvester.finish()
    took = time.monotonic() - began
    logger.info("the spool was filled in %.0f s, %.0f s of them spent waiting for training to make room", took, waited)


def _job(jobs: Sequence[ShardJob], index: int) -> ShardJob:
    """The work behind a spool index."""
    return replace(jobs[index % len(jobs)], index=index)


# ---- Ways to run the target ----


def harvesting(recipe: Recipe, spec: TargetSpec) -> Task:
    """The task of making shards."""
    return Task(partial(backend, recipe, spec), recipe.engine.tensor_parallel_size, "harvesting", "seq")


@contextmanager
def backend(recipe: Recipe, spec: TargetSpec) -> Iterator[Worker]:
    """The recipe's way to run the target, started when the block is entered."""
    if recipe.states.backend == "transformers":
        from drafthead.generation.harvest_transformers import transformers_harvester

        with transformers_harvester(recipe, spec) as harvester:
            yield harvester
    else:
        with harvest_engine(recipe, spec) as llm:
            yield _VllmHarvester(llm)


class _VllmHarvester:
    def __init__(self, llm: "LLM"):
        self._llm = llm

    def make(self, job: ShardJob, bar: tqdm) -> None:
        from vllm import SamplingParams

        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 1, "detokenize": False}
        params = [
            SamplingParams(**options, extra_args={"kv_transfer_params": slot.to_params()}) for slot in job.slots()
        ]
        generate(self._llm, job.sequences(), params, bar)
        check_written_states(self._llm, wait=False)

    def finish(self) -> None:
        check_written_states(self._llm, wait=True)


# ---- What was made ----


def print_states(recipe: Recipe) -> None:
    """One line per split: sequences, tokens, bytes per token in the recipe's format."""
    for split in SPLITS:
        kind = SPOOL if split == "train" and recipe.states.spool_shards is not None else KIND
        counts = require(recipe.states_dir(split), kind, "python data_gen/harvest.py RECIPE")["counts"]
        if kind == SPOOL:
            print(f"{split:<10} {counts['shards']} shards ({counts['epochs']} epochs) passed through the spool")
            continue
        print(
            f"{split:<10} {counts['sequences']:,} sequences, {counts['tokens']:,} tokens "
            f"({counts['loss_tokens']:,} in the loss), {counts['shards']} shards, "
            f"{counts['bytes_per_token']:,.0f} bytes per token in {recipe.states.format}"
        )
        if (agreement := counts["argmax_agreement"]) is not None:
            print(f"{'':<10} the target's argmax is its own text at {agreement:.1%} of positions")


def print_verification(recipe: Recipe) -> bool:
    """`harvest.py --verify`: read both splits and print a line per split and per problem.

    Returns:
        Whether both are whole. Of a spool, whose shards come and go without checksums, those that exist are read.
    """
    whole = True
    for split in SPLITS:
        directory = recipe.states_dir(split)
        shards = sorted(directory.glob("shard-*.safetensors"))
        identity = read_json(directory / IDENTITY) if (directory / IDENTITY).exists() else {}
        if identity.get("kind") == SPOOL:
            problems, checked = [p for path in shards for p in verify_shard(path, identity)], "structure and values"
        else:
            problems, checked = verify_store(directory), "checksums, structure and values"
        found = f"{len(problems)} problems" if problems else "whole"
        print(f"{split:<10} {len(shards)} shards, {checked}: {found}")
        for problem in problems:
            print(f"{'':<10} {problem}")
        whole = whole and not problems
    return whole
