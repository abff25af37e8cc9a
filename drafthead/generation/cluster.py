"""Responses or states from a Ray cluster: an actor per engine, a task per part or shard.

The work is Ray's: it places the actors, restarts one that died and runs its task again, and ActorPool hands the next
job to whichever engine is free. Files are whole or absent on a file system that all nodes share, so a task may run
twice, and whatever is missing after a round is handed out again in the next, with new engines where there is room:

- An engine that dies loses what it computes, which Ray retries, and the shard on its way to disk, which the next
  round makes.
- A node that goes for good takes its engines along. Their tasks would wait for ever, or use up their retries before
  Ray knows: the round ends when nothing else runs, or with the first task that is lost.

Given up: the engines of a round are fixed, so a node that joins later is used from the next round or command on.
"""

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from tqdm import tqdm

from drafthead.engine.offline import keep_engines_in_this_process
from drafthead.generation.running import Job, Task, Worker, unwritten
from drafthead.progress import progress_bar

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
try:
    import ray
    from ray.exceptions import RayActorError, RayError, RayTaskError
    from ray.util import ActorPool
except ImportError as error:
    raise ValueError(
        f"Ray cannot be imported ({error}); run: pip install -e '.[cluster]', or leave out --cluster"
    ) from error

ATTEMPTS = 3  # rounds that may lose the same shard
_RETRIES = 1  # by Ray, within a round
_LOOK_EVERY = 5.0  # seconds; how often to look whether engines have lost their place


class Engine:
    """A worker in a process of its own. It starts with its first job: dying there counts as an attempt."""

    def __init__(self, task: Task):
        self._task = task
        self._running = ExitStack()
        self._worker: Worker | None = None

    def make(self, job: Job) -> int:
        """Do a job, whose file may go to disk while the next one is computed; its size."""
        if self._worker is None:
            keep_engines_in_this_process()
            self._worker = self._running.enter_context(self._task.start())
        if not job.path.exists():
            self._worker.make(job, tqdm(disable=True))
        return job.size

    def finish(self) -> int:
        """Wait until every file is on disk."""
        if self._worker is not None:
            self._worker.finish()
        return 0


def run_on_cluster(task: Task, jobs: Sequence[Job], workers: int | None = None) -> None:
    """Do jobs with all engines that a Ray cluster has room for.

    The cluster is the one that RAY_ADDRESS names or that runs on this machine, else one that is started here and ends
    with the work.

    Args:
        task: what to do.
        jobs: those whose files are missing.
        workers: engines, instead of as many as there is room for.

    Raises:
        ValueError: there is no room for an engine or for `workers` of them, a file could not be written, or one
            was lost with its engines in ATTEMPTS rounds.
    """
    total, lost = sum(job.size for job in jobs), Counter[str]()
    with _cluster(), progress_bar(total, task.doing, task.unit) as bar:
        # The GPUs of a tensor-parallel group, or a core where no node has a GPU.
        needs = {"GPU": task.gpus} if "GPU" in ray.cluster_resources() else {"CPU": 1}
        count = _count(needs, workers)
        while missing := unwritten(jobs):
            bar.n = total - sum(job.size for job in missing)
            with _engines(task, needs, min(count, _room(needs), len(missing))) as engines:
                began, failure = _hand_out(engines, missing, needs, bar)
                failure = _settle(engines, needs) or failure
            lost.update(str(job.path) for job in unwritten(missing[:began]))
            _check(failure, lost)


def _places(needs: dict[str, int]) -> int:
    """Engines that the nodes have room for; one engine does not span nodes."""
    [(name, wanted)] = needs.items()
    return sum(int(node["Resources"].get(name, 0) // wanted) for node in ray.nodes() if node["Alive"])


def _room(needs: dict[str, int]) -> int:
    """The places, of which there has to be one."""
    places = _places(needs)
    if places == 0:
        [(name, wanted)] = needs.items()
        raise ValueError(f"no node of the Ray cluster has the {wanted} {name} that an engine takes; add one that has")
    return places


def _count(needs: dict[str, int], workers: int | None) -> int:
    """Engines to run: `workers`, or as many as there is room for beside other work on the cluster."""
    [(name, wanted)] = needs.items()
    free = min(_room(needs), int(ray.available_resources().get(name, 0) // wanted))
    if free == 0 or (workers is not None and not 1 <= workers <= free):
        raise ValueError(
            f"the Ray cluster has {free} free places for an engine of {wanted} {name}, and "
            f"{'at least 1 is' if workers is None else f'--workers {workers} are'} wanted; add nodes, end other work "
            "on it, or leave out --workers to use all that are free"
        )
    return workers or free


@contextmanager
def _cluster() -> Iterator[None]:
    """Connected to a cluster."""
    ray.init(include_dashboard=False, logging_level=logging.WARNING)
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _engines(task: Task, needs: dict[str, int], count: int) -> Iterator[list[Any]]:
    """Actors, ended with the block. They are restarted without limit: the attempts of a job are what is bounded."""
    actor: Any = ray.remote(Engine).options(
        num_cpus=needs.get("CPU", 0), num_gpus=needs.get("GPU", 0), max_restarts=-1, max_task_retries=_RETRIES
    )
    engines = [actor.remote(task) for _ in range(count)]
    try:
        yield engines
    finally:
        for engine in engines:
            ray.kill(engine)


def _hand_out(engines: list[Any], jobs: Sequence[Job], needs: dict[str, int], bar: tqdm) -> tuple[int, RayError | None]:
    """Every job to one engine, in order; after a failure none is begun, but those in work are ended.

    Returns:
        How many jobs were begun, and the first failure.
    """
    pool, began, running = ActorPool(engines), 0, 0
    failure: RayError | None = None
    while running or (began < len(jobs) and not failure):
        while began < len(jobs) and not failure and pool.has_free():
            pool.submit(lambda engine, job: engine.make.remote(job), jobs[began])
            began, running = began + 1, running + 1
        try:
            bar.update(pool.get_next_unordered(timeout=_LOOK_EVERY))
        except RayError as error:
            failure = failure or error
        except TimeoutError:
            if (failure or began == len(jobs)) and running <= len(engines) - _places(needs):
                break  # what still runs has no place to run on
            continue
        running -= 1
    return began, failure


def _settle(engines: list[Any], needs: dict[str, int]) -> RayTaskError | None:
    """Wait until all engines that have a place have written what they computed; returns why one could not."""
    finishing = [engine.finish.remote() for engine in engines]
    ready: list[Any] = []
    while len(ready) < min(len(engines), _places(needs)):
        ready, _ = ray.wait(finishing, num_returns=len(finishing), timeout=_LOOK_EVERY)
    for future in ready:
        try:
            ray.get(future)
        except RayTaskError as error:
            return error
        except RayActorError:
            continue  # what died with it is found missing
    return None


def _check(failure: RayError | None, lost: Counter[str]) -> None:
    """See that there is reason to go on.

    Raises:
        ValueError: a job was lost too often.
        Exception: whatever an engine raised.
    """
    if isinstance(failure, RayTaskError):
        raise failure.cause from failure
    for path, rounds in lost.items():
        if rounds >= ATTEMPTS:
            raise ValueError(
                f"{path} was lost with its engine in {rounds} rounds of {1 + _RETRIES} attempts. What Ray says above, "
                "or the logs of the dead workers (/tmp/ray/session_latest/logs on their node), tells why; where it is "
                "memory, lower engine.max_num_seqs or engine.gpu_memory_utilization. The same command continues"
            ) from failure
