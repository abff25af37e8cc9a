"""The harvester's side of online training: keep the spool of the training split full until training has all it needs.

Validation is harvested first, into an ordinary store. Then shards follow in the order in which training reads them,
through all epochs. Where nothing fits, the harvester waits for the trainer; where the trainer is ahead, it waits for
the harvester. What to write next is read off the spool each time, so a restart needs no state of its own. While one
shard goes to disk the next is computed, if the spool has room for both.

Given up: the engine holds its memory while it waits, so harvester and trainer want devices of their own.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cache

from drafthead.artifacts import MANIFEST, finish
from drafthead.config import Recipe
from drafthead.data.spool import Demand, Spool, open_spool
from drafthead.generation.harvest import backend, finish_split, harvesting
from drafthead.generation.running import Worker, make_all
from drafthead.generation.shards import ShardJob, list_jobs, to_do
from drafthead.progress import progress_bar, wait_until
from drafthead.target.pieces import TargetSpec

logger = logging.getLogger(__name__)

_TRAIN = "accelerate launch train/eagle3.py RECIPE"


def harvest_online(recipe: Recipe, spec: TargetSpec, validation: bool) -> None:
    """Harvest the validation split if it is wanted, then fill the spool until nothing is left to write.

    Args:
        recipe: with states.spool_shards.
        spec: of the target.
        validation: whether the validation split is unfinished; both directories are claimed already.

    Raises:
        ArtifactError: a shard in the spool is damaged or holds other sequences.
        InUseError: another harvester fills it.
        ValueError: a sequence is too long, or a shard could not be written.
    """
    jobs = list_jobs(recipe, "train")
    spool = open_spool(recipe, sum(job.size for job in jobs))
    with spool.filling(), ExitStack() as stack:
        start: Callable[[], Worker] = cache(lambda: stack.enter_context(backend(recipe, spec)))
        if validation:
            wanted = list_jobs(recipe, "validation")
            if missing := to_do(wanted):
                make_all(start(), harvesting(recipe, spec), missing)
            finish_split(recipe, wanted, "validation")
        to_do([_job(jobs, index) for index in sorted(spool.present())])  # raises if one is damaged
        if not spool.demand().done:
            (spool.directory / MANIFEST).unlink(missing_ok=True)
            fill(start(), spool, jobs)
        if spool.first_needed() == spool.total:
            spool.release(spool.total)  # training ended while the last shard was on its way
    if not (spool.directory / MANIFEST).exists():
        counts = {
            "sequences": sum(job.size for job in jobs),
            "tokens": sum(job.num_tokens for job in jobs),
            "loss_tokens": sum(len(response.response_ids) for job in jobs for response in job.responses),
            "shards": spool.total,
            "epochs": spool.epochs,
        }
        finish(spool.directory, counts, lasting=False)


def fill(harvester: Worker, spool: Spool, jobs: Sequence[ShardJob]) -> None:
    """Write what the spool demands until it demands nothing more.

    Args:
        harvester: a running backend.
        spool: claimed by this process.
        jobs: the shards of one epoch.
    """
    began, waited, tokens = time.monotonic(), 0.0, 0
    in_flight: int | None = None
    done = sum(_job(jobs, index).size for index in {*range(spool.first_needed()), *spool.present()})
    total = spool.epochs * sum(job.size for job in jobs)
    with progress_bar(total, "harvesting", "seq", initial=done) as bar:
        while not (demand := spool.demand(in_flight)).done:
            if demand.index is None:
                harvester.finish()
                in_flight = None
                waited += _wait_for_room(spool)
                continue
            job = _job(jobs, demand.index)
            harvester.make(job, bar)
            in_flight = demand.index
            tokens += job.num_tokens
        harvester.finish()
    seconds = f"{time.monotonic() - began:,.0f} s, {waited:,.0f} s of them spent waiting for training to make room"
    logger.info("harvested %s tokens in %s", f"{tokens:,}", seconds)


def _wait_for_room(spool: Spool) -> float:
    what = (
        f"training to use up a shard of {spool.directory}, which has its {spool.capacity}; "
        f"if it is not running: {_TRAIN}"
    )
    return wait_until(lambda: spool.demand() != Demand(index=None, done=False), what)


def _job(jobs: Sequence[ShardJob], index: int) -> ShardJob:
    """The work behind a spool index."""
    return replace(jobs[index % len(jobs)], index=index)
