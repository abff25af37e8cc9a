"""How much longer a harvest takes than the same prefill without it.

    python benchmarks/harvest.py [RECIPE] [section.key=value ...] [--sequences 1600] [--blocks 3]

One process, the recipe's engine settings, prefix caching off, the same batches of the same texts (the recipe's
training responses). A plain engine reads them and generates one token each; a harvesting engine does the same and
leaves finished shards on disk, which the clock waits for. Engines follow one another as plain, harvest, harvest,
plain (ABBA) in every block, so that what else the machine does hits both alike; each reads one batch untimed first.
The ratio of a block is that of its two means; the last line is the median over blocks.

Beside wall time stand CPU seconds, which hardly depend on what else the machine does: of the engine's own thread, and
of the process. Their difference is what the harvest does beside the engine; it costs wall time where no core is free.
"""

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from drafthead.artifacts import made_by
from drafthead.cli import recipe_from_command_line, run_recipe
from drafthead.config import Recipe
from drafthead.generation.harvest import backend
from drafthead.generation.shards import ShardJob, list_jobs
from drafthead.target.spec import TargetSpec, load_target_spec


class Taken(NamedTuple):
    """Seconds by three clocks; on CPU the engine runs in the calling thread."""

    wall: float
    engine_cpu: float
    process_cpu: float


def taken(work: Callable[[], object]) -> Taken:
    """What it takes."""
    clocks = (time.perf_counter, time.thread_time, time.process_time)
    start = [clock() for clock in clocks]
    work()
    return Taken(*(clock() - begun for clock, begun in zip(clocks, start, strict=True)))


def mean(runs: Iterable[Taken]) -> Taken:
    """By clock."""
    return Taken(*map(statistics.mean, zip(*runs, strict=True)))


def jobs_of(recipe: Recipe, directory: Path, sequences: int) -> list[ShardJob]:
    """Shards of the training responses, `sequences` in all, to be written below `directory`."""
    jobs: list[ShardJob] = []
    for job in list_jobs(recipe, "train"):
        remaining = sequences - sum(len(j.responses) for j in jobs)
        if remaining > 0:
            jobs.append(replace(job, path=directory / job.path.name, responses=job.responses[:remaining]))
    return jobs


def plain_engine(recipe: Recipe) -> AbstractContextManager[Any]:
    """The engine of a harvest, without what makes it one."""
    from drafthead.engine.offline import offline_engine

    return offline_engine(recipe, enable_prefix_caching=False, disable_log_stats=True, async_scheduling=False)


def time_plain(recipe: Recipe, jobs: Sequence[ShardJob]) -> Taken:
    """Time to read all texts."""
    from drafthead.engine.generate import Engine, GenerationRequest

    with plain_engine(recipe) as llm:
        engine = Engine(llm)

        def read(texts: Iterable[list[int]]) -> None:
            engine.generate([GenerationRequest(ids, 1, 0.0, None) for ids in texts])

        read([sequence.token_ids for sequence in jobs[0].sequences()[:32]])
        return taken(lambda: [read([sequence.token_ids for sequence in job.sequences()]) for job in jobs])


def time_harvest(recipe: Recipe, spec: TargetSpec, jobs: Sequence[ShardJob]) -> Taken:
    """Time to read all texts and have their states on disk."""
    with backend(recipe, spec) as harvester, tqdm(disable=True) as bar:
        first = replace(jobs[0], path=jobs[0].path.with_stem("warm"), responses=jobs[0].responses[:32])
        return time_jobs(harvester, first, jobs, bar)


def time_jobs(worker: Any, first: Any, jobs: Sequence[Any], bar: tqdm) -> Taken:
    """Time until a worker has its jobs on disk, once the first is done."""

    def make(jobs: Sequence[Any]) -> None:
        for job in jobs:
            worker.make(job, bar)
        worker.finish()

    make([first])
    return taken(lambda: make(jobs))


def run_block(recipe: Recipe, spec: TargetSpec, sequences: int) -> tuple[Taken, Taken]:
    """Plain, harvest, harvest, plain: mean times of either."""
    runs: dict[str, list[Taken]] = {"plain": [], "harvest": []}
    for kind in ("plain", "harvest", "harvest", "plain"):
        with tempfile.TemporaryDirectory(dir=recipe.directory()) as directory:
            jobs = jobs_of(recipe, Path(directory), sequences)
            runs[kind].append(time_plain(recipe, jobs) if kind == "plain" else time_harvest(recipe, spec, jobs))
    return mean(runs["plain"]), mean(runs["harvest"])


def main() -> None:
    recipe, args = recipe_from_command_line(
        __doc__, ("--sequences", {"type": int, "default": 1600}), ("--blocks", {"type": int, "default": 3})
    )
    spec = load_target_spec(recipe.target_path, recipe.target.revision)
    jobs = jobs_of(recipe, recipe.directory(), args.sequences)
    tokens = sum(job.num_tokens for job in jobs)
    made = made_by()
    print(f"{tokens:,} tokens in {sum(len(j.responses) for j in jobs)} sequences; {made['machine']}; {made['created']}")
    print(f"states.format {recipe.states.format}, load average {os.getloadavg()[0]:.1f}")
    ratios = []
    for block in range(args.blocks):
        plain, harvest = run_block(recipe, spec, args.sequences)
        ratios.append(harvest.wall / plain.wall)
        print(
            f"block {block + 1}: plain {plain.wall:.2f} s, harvest {harvest.wall:.2f} s, ratio {ratios[-1]:.3f}; "
            f"CPU of the engine's thread {harvest.engine_cpu / plain.engine_cpu:.3f}, "
            f"of the process {harvest.process_cpu / plain.process_cpu:.3f}",
            flush=True,
        )
    print_median(ratios)


def print_median(ratios: Sequence[float]) -> None:
    print(f"median ratio {statistics.median(ratios):.3f} (lowest {min(ratios):.3f}, highest {max(ratios):.3f})")


if __name__ == "__main__":
    run_recipe(main)
