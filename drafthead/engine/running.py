"""Who does the work of a stage: one worker in this process, one for each GPU of this machine, or a Ray cluster.

Work is a list of jobs, each a file that is whole or absent and that follows from its inputs alone: a part of the
responses, a shard of the states, or responses whose acceptance is counted. A worker is a running engine. Resuming,
retrying and spreading over processes and nodes are therefore the same thing: make the files that are missing.

On a machine with several GPUs, as many engines as they have room for run in processes of their own and take jobs from
one queue. Given up against Ray: an engine that dies is not started again; the others finish, then the stage ends with
an error, and the same command continues.
"""

import argparse
import logging
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from multiprocessing.managers import SyncManager
from pathlib import Path
from queue import Empty
from typing import Any, Protocol, TypeVar

import torch
from tqdm import tqdm

from drafthead.config import Recipe
from drafthead.engine.offline import keep_engines_in_this_process
from drafthead.processes import ends_with_parent
from drafthead.progress import progress_bar

logger = logging.getLogger(__name__)
LOOK_EVERY = 5.0  # seconds; how often the bar follows the engines or their files


class Job(Protocol):
    """A unit of work: the file that it makes, and the sequences in it, for the progress bar."""

    @property
    def path(self) -> Path: ...

    @property
    def size(self) -> int: ...


class Worker(Protocol):
    """A running engine."""

    def make(self, job: Any, bar: tqdm) -> None:
        """Do a job; its file may still be on its way to disk. Raises what went wrong."""

    def finish(self) -> None:
        """Wait until every file is on disk; raises what went wrong."""


@dataclass(frozen=True)
class Task:
    """What to do with jobs.

    Attributes:
        start: starts a worker; pickled for other processes.
        gpus: number of GPUs that a worker takes, where there are any.
        doing: title of the progress bar, such as "harvesting".
        unit: unit that the size of a job counts.
    """

    start: Callable[[], AbstractContextManager[Worker]]
    gpus: int
    doing: str
    unit: str

    def bar(self, jobs: Sequence[Job]) -> tqdm:
        """Of the sequences of these jobs."""
        return progress_bar(sum(job.size for job in jobs), self.doing, self.unit)


Runner = Callable[[Task, Sequence[Job]], None]
AnyJob = TypeVar("AnyJob", bound=Job)

WORKERS = ("--workers", {"type": int, "metavar": "N", "help": "engines; default: all that the GPUs have room for"})
OPTIONS = (
    ("--cluster", {"action": "store_true", "help": "spread the work over a Ray cluster (RAY_ADDRESS, or local)"}),
    WORKERS,
)


def runner(args: argparse.Namespace, recipe: Recipe, alone: bool = False) -> Runner:
    """What does the work.

    Args:
        args: the command line's OPTIONS.
        recipe: recipe; its engine section tells how many GPUs an engine takes.
        alone: one engine unless the command line wants more.

    Raises:
        ValueError: no engine is wanted.
    """
    workers = node_engines(recipe.engine.tensor_parallel_size, 1 if alone and args.workers is None else args.workers)
    if args.cluster:
        from drafthead.engine.cluster import run_on_cluster  # Ray is an extra

        return partial(run_on_cluster, workers=args.workers)
    return run_here if workers == 1 else partial(run_on_node, workers=workers)


def node_engines(gpus: int, workers: int | None = None) -> int:
    """Engines of so many GPUs each that this machine has room for, 1 without a GPU; or as many as are wanted."""
    if workers is None:
        return max(1, torch.cuda.device_count() // gpus)  # asks NVML: CUDA is not initialised before engines start
    if workers < 1:
        raise ValueError(f"--workers {workers} does no work; give 1 or more, or leave it out")
    return workers


def run_here(task: Task, jobs: Sequence[Job]) -> None:
    """Do jobs with one worker of this process."""
    with task.bar(jobs) as bar:
        _make(task, iter(jobs), bar)


def run_on_node(task: Task, jobs: Sequence[Job], workers: int) -> None:
    """Do jobs with several workers, each a process with GPUs of its own.

    Raises:
        ValueError: a worker died.
        Exception: whatever a worker raised.
    """
    workers = min(workers, len(jobs))
    context = multiprocessing.get_context("spawn")
    manager = SyncManager(ctx=context)
    manager.start(ends_with_parent())
    with manager, ExitStack() as stack, task.bar(jobs) as bar:
        queue, done = manager.Queue(), manager.Queue()
        for job in jobs:
            queue.put(job)
        running, failures = set(), []
        for devices in _devices(task.gpus, workers):  # a pool each: one whose process died ends its other processes
            pool = stack.enter_context(ProcessPoolExecutor(1, context, ends_with_parent()))
            running.add(pool.submit(run_engine, task, queue.get_nowait, done.put, devices, workers))
        while running:
            ended, running = wait(running, timeout=LOOK_EVERY, return_when=FIRST_EXCEPTION)
            while not done.empty():
                bar.update(done.get())
            for worker in ended:
                if error := worker.exception():
                    failures.append(error)
                    if running:
                        logger.error("an engine failed (%s); %d others go on", error, len(running))
        if any(isinstance(error, BrokenProcessPool) for error in failures):
            raise ValueError("an engine's process died; what it said is above. Run the same command again")
        if failures:
            raise failures[0]
        follow(bar, jobs)


def run_engine(
    task: Task,
    take: Callable[[], Job],
    update: Callable[[int], object] | None = None,
    devices: str | None = None,
    engines: int = 1,
) -> None:
    """Do jobs until there are none (`queue.Empty`), and wait until their files are on disk.

    Args:
        task: task that the jobs belong to.
        take: returns the next job; raises Empty when there is none.
        update: called with how many more sequences are done.
        devices: value of CUDA_VISIBLE_DEVICES for this worker; None: unchanged.
        engines: number of engines that share the cores where there are no GPUs.
    """
    if devices is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = devices
    elif "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, torch.get_num_threads() // engines))
    keep_engines_in_this_process()
    bar = tqdm(disable=True)
    if update is not None:
        bar.update = update
    _make(task, _taken(take), bar)


def _taken(take: Callable[[], Job]) -> Iterator[Job]:
    with suppress(Empty):
        while True:
            yield take()


def _make(task: Task, jobs: Iterator[Job], bar: tqdm) -> None:
    """Run the jobs whose output is missing; no engine starts where there is none."""
    if (first := next(jobs, None)) is not None:
        with task.start() as worker:
            for job in chain([first], jobs):
                if not job.path.exists():
                    worker.make(job, bar)
            worker.finish()


def follow(bar: tqdm, jobs: Sequence[Job]) -> None:
    """Advance the bar to the jobs whose files exist."""
    bar.update(bar.total - sum(job.size for job in unwritten(jobs)) - bar.n)


def _devices(gpus: int, workers: int) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each worker; None where there are no GPUs to share."""
    count = torch.cuda.device_count()
    if count < gpus * workers:
        if count:
            raise ValueError(f"--workers {workers} of {gpus} GPUs each: this machine has {count}; give fewer")
        return [None] * workers
    named = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(count)))).split(",")
    return [",".join(named[i * gpus : (i + 1) * gpus]) for i in range(workers)]


def unwritten(jobs: Sequence[AnyJob]) -> list[AnyJob]:
    """The jobs whose files do not exist.

    By listing: a network file system may deny a name for a minute after it was looked up too early.
    """
    names = {directory: set(os.listdir(directory)) for directory in {job.path.parent for job in jobs}}
    return [job for job in jobs if job.path.name not in names[job.path.parent]]
