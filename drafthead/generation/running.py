"""Who does the work of generation: one worker in this process, or many on a Ray cluster.

Work is a list of jobs, each a file that is whole or absent and that follows from its inputs alone: a part of the
responses, or a shard of the states. A worker is a running engine. Resuming, retrying and spreading over processes and
nodes are therefore the same thing: make the files that are missing.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

from tqdm import tqdm

from drafthead.progress import progress_bar


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
        gpus: that a worker takes, where there are any.
        doing: for the progress bar, such as "harvesting".
        unit: that the size of a job counts.
    """

    start: Callable[[], AbstractContextManager[Worker]]
    gpus: int
    doing: str
    unit: str


Runner = Callable[[Task, Sequence[Job]], None]
AnyJob = TypeVar("AnyJob", bound=Job)

OPTIONS = (
    ("--cluster", {"action": "store_true", "help": "spread the work over a Ray cluster (RAY_ADDRESS, or local)"}),
    ("--workers", {"type": int, "metavar": "N", "help": "engines on the cluster; default: all it has room for"}),
)


def runner(args: argparse.Namespace) -> Runner:
    """What does the work, by the command line's OPTIONS."""
    if args.cluster:
        from drafthead.generation.cluster import run_on_cluster  # Ray is an extra

        return partial(run_on_cluster, workers=args.workers)
    if args.workers is not None:
        raise ValueError(f"--workers {args.workers} needs --cluster; add it, or leave out --workers")
    return run_here


def run_here(task: Task, jobs: Sequence[Job]) -> None:
    """Do jobs with one worker of this process.

    Raises:
        ValueError: a file does not exist.
    """
    with task.start() as worker, progress_bar(sum(job.size for job in jobs), task.doing, task.unit) as bar:
        for job in jobs:
            worker.make(job, bar)
        worker.finish()
    if lacking := unwritten(jobs):
        raise ValueError(
            f"the engine returned but {len(lacking)} of {len(jobs)} files were not written, {lacking[0].path} first; "
            "run the same command again"
        )


def unwritten(jobs: Sequence[AnyJob]) -> list[AnyJob]:
    """The jobs whose files do not exist.

    By listing: a network file system may deny a name for a minute after it was looked up too early.
    """
    names = {directory: set(os.listdir(directory)) for directory in {job.path.parent for job in jobs}}
    return [job for job in jobs if job.path.name not in names[job.path.parent]]
