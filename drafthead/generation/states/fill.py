"""The harvester's side of online training: keep the spool of the training split full until training has all it needs.

Validation is harvested first, into an ordinary store. Then shards follow in the order in which training reads them,
through all epochs. Where nothing fits, the harvester waits for the trainer; where the trainer is ahead, it waits for
the harvester. What to write next is read off the spool each time, so a restart needs no state of its own. While one
shard goes to disk the next is computed, if the spool has room for both.

Given up: the engine holds its memory while it waits, so harvester and trainer want devices of their own.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import cache

from tqdm import tqdm

from drafthead.config import Recipe
from drafthead.data.spool import Demand, Spool, open_spool
from drafthead.generation.running import Worker, make_all
from drafthead.generation.states.harvesters import backend, harvesting
from drafthead.generation.states.shard_jobs import ShardJob, list_jobs, to_do
from drafthead.generation.states.state_stores import finish_split
from drafthead.progress import progress_bar, wait_until
from drafthead.provenance import MANIFEST, finish
from drafthead.target.pieces import TargetSpec

_TRAIN = "accelerate launch train/eagle3.py RECIPE"


def harvest_online(recipe: Recipe, spec: TargetSpec, validation: bool) -> None:
    """Harvest the validation split if it is wanted, then fill the spool until nothing is left to write.

    Args:
        recipe: with states.spool_shards.
        spec: of the target.
        validation: whether the validation split is unfinished; both directories are claimed already.

    Raises:
        ArtefactError: a shard in the spool is damaged or foreign.
        InUseError: another harvester fills it.
        ValueError: a text is too long, or a shard could not be written.
    """
    jobs = list_jobs(recipe, "train")
    spool = open_spool(recipe, sum(len(job.responses) for job in jobs))
    with spool.filling(), ExitStack() as stack:
        start: Callable[[], Worker] = cache(lambda: stack.enter_context(backend(recipe, spec)))
        if validation:
            wanted = list_jobs(recipe, "validation")
            if missing := to_do(wanted):
                make_all(start(), harvesting(recipe, spec), missing)
            finish_split(recipe, wanted, "validation")
        to_do([_job(jobs, index) for index in sorted(spool.present())])  # raises if one is not what it says
        if not spool.demand().done:
            (spool.directory / MANIFEST).unlink(missing_ok=True)
            fill(start(), spool, jobs)
        if spool.first_needed() == spool.total:
            spool.release(spool.total)  # training ended while the last shard was on its way
    if not (spool.directory / MANIFEST).exists():
        finish(spool.directory, _counts(jobs, spool), lasting=False)


def fill(harvester: Worker, spool: Spool, jobs: Sequence[ShardJob]) -> None:
    """Write what the spool asks for until it asks for nothing more.

    Args:
        harvester: a running backend.
        spool: claimed by this process.
        jobs: the shards of one epoch.
    """
    began, waited, tokens = time.monotonic(), 0.0, 0
    in_flight: int | None = None
    with _bar(spool, jobs) as bar:
        while not (demand := spool.demand(in_flight)).done:
            if demand.index is None:
                harvester.finish()
                in_flight = None
                waited += _wait_for_room(spool)
                continue
            job = _job(jobs, demand.index)
            harvester.make(job, bar)
            in_flight = demand.index
            tokens += sum(len(text) for text in job.texts())
        harvester.finish()
    print(
        f"harvested {tokens:,} tokens in {time.monotonic() - began:,.0f} s, {waited:,.0f} s of them "
        "spent waiting for training to make room"
    )


def _wait_for_room(spool: Spool) -> float:
    def changed() -> bool:
        return spool.demand() != Demand(index=None, done=False)

    what = (
        f"training to use up a shard of {spool.directory}, which has its {spool.capacity}; "
        f"if it is not running: {_TRAIN}"
    )
    return wait_until(changed, what)


def _job(jobs: Sequence[ShardJob], index: int) -> ShardJob:
    """The work behind a spool index."""
    return replace(jobs[index % len(jobs)], index=index)


def _bar(spool: Spool, jobs: Sequence[ShardJob]) -> AbstractContextManager[tqdm]:
    done = {*range(spool.first_needed()), *spool.present()}
    initial = sum(len(_job(jobs, index).responses) for index in done)
    total = spool.epochs * sum(len(job.responses) for job in jobs)
    return progress_bar(total, "harvesting", "seq", initial=initial)


def _counts(jobs: Sequence[ShardJob], spool: Spool) -> dict[str, int]:
    return {
        "sequences": sum(len(job.responses) for job in jobs),
        "tokens": sum(len(text) for job in jobs for text in job.texts()),
        "loss_tokens": sum(len(response.response_ids) for job in jobs for response in job.responses),
        "shards": spool.total,
        "epochs": spool.epochs,
    }
