"""Responses or states from a Ray cluster: engines that take jobs from one queue until it is empty.

An engine is one long Ray task, so Ray places it, and starts it again, once, when its process or node dies. Files are
whole or absent on a file system that all nodes share; what was lost with an engine is found missing when the queue is
empty, and is put into the queue of the next round.

Given up: the number of engines is fixed, so a node that joins later is used by the next command only. A place that
other work on the cluster holds is waited for.
"""

import logging
import os
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from drafthead.engine.running import LOOK_EVERY, Job, Task, follow, run_engine, unwritten

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
try:
    import ray
    from ray.exceptions import RayError, RayTaskError
    from ray.util.queue import Queue
except ImportError as error:
    raise ValueError(
        f"Ray cannot be imported ({error}); run: pip install -e '.[cluster]', or leave out --cluster"
    ) from error

ATTEMPTS = 3  # rounds in a row that may write nothing
_ON_HEAD = {"num_cpus": 0, "resources": {"node:__internal_head__": 0.001}}  # the one node without which Ray ends


def run_on_cluster(task: Task, jobs: Sequence[Job], workers: int | None = None) -> None:
    """Do jobs with all engines that a Ray cluster has room for.

    The cluster is the one that RAY_ADDRESS names or that runs on this machine, else one that is started here and ends
    with the work.

    Args:
        task: task that the jobs belong to.
        jobs: jobs whose files are missing.
        workers: number of engines; None: as many as there is room for.

    Raises:
        ValueError: there is no room for an engine or for `workers` of them, or ATTEMPTS rounds wrote nothing.
        Exception: whatever an engine raised.
    """
    ray.init(include_dashboard=False, logging_level=logging.WARNING)
    try:
        # The GPUs of a tensor-parallel group, or a core where no node has a GPU.
        resource, amount = ("GPU", task.gpus) if "GPU" in ray.cluster_resources() else ("CPU", 1)
        # By node: one engine does not span several.
        places = sum(int(node["Resources"].get(resource, 0) // amount) for node in ray.nodes() if node["Alive"])
        if not 1 <= (workers or 1) <= places:
            raise ValueError(
                f"the Ray cluster has places for {places} engines of {amount} {resource}, wanted: {workers or 1}; add "
                "nodes, or leave out --workers to use all places"
            )
        needs = {"num_gpus": amount} if resource == "GPU" else {"num_cpus": amount}
        fruitless = 0
        with task.bar(jobs) as bar:
            while missing := unwritten(jobs):
                lost = _round(task, missing, min(workers or places, len(missing)), needs, bar)
                fruitless = 0 if len(unwritten(jobs)) < len(missing) else fruitless + 1
                if fruitless == ATTEMPTS:
                    raise ValueError(
                        f"{missing[0].path} was not written in {ATTEMPTS} rounds. What Ray says above, or the logs of "
                        "the dead workers (/tmp/ray/session_latest/logs on their node), tells why; where it is memory, "
                        "lower engine.max_num_seqs or engine.gpu_memory_utilization. The same command continues"
                    ) from lost
    finally:
        ray.shutdown()


def _round(task: Task, jobs: Sequence[Job], engines: int, needs: dict[str, int], bar: tqdm) -> RayError | None:
    """Give every job to one of the engines once; returns what became of an engine that died twice."""
    queue = Queue(actor_options=_ON_HEAD)
    queue.put_nowait_batch([[ray.put(job)] for job in jobs])  # by reference: a queue of all tokens would be large
    start: Any = ray.remote(run_ray_engine).options(**{"num_cpus": 0, **needs}, max_retries=1)
    running, lost = [start.remote(task, queue) for _ in range(engines)], None
    try:
        while running:
            ended, running = ray.wait(running, timeout=LOOK_EVERY)
            follow(bar, jobs)
            try:
                ray.get(ended)
            except RayTaskError as error:
                raise error.cause from error
            except RayError as error:
                lost = error
    finally:
        for engine in running:
            ray.cancel(engine, force=True)
        queue.shutdown(force=True)
    return lost


def run_ray_engine(task: Task, queue: Queue) -> None:
    """Do jobs until the queue is empty."""

    def take() -> Job:
        [reference] = queue.get_nowait()
        return ray.get(reference)

    run_engine(task, take)
