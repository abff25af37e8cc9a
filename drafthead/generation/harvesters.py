"""The ways to run a target so that its states are stored, and running them over shards in this process."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

from tqdm import tqdm

from drafthead.config import Recipe
from drafthead.generation.shard_jobs import ShardJob, unwritten
from drafthead.models.target import TargetSpec
from drafthead.progress import progress_bar
from drafthead.serving.capturing import check_written_states


class Harvester(Protocol):
    """A running backend."""

    def harvest(self, job: ShardJob, bar: tqdm) -> None:
        """Compute and hand over the shard's rows; raises what went wrong."""

    def finish(self) -> None:
        """Wait until every shard is on disk; raises what went wrong."""


def backend(recipe: Recipe, spec: TargetSpec) -> AbstractContextManager[Harvester]:
    """The recipe's way to run the target, started when the block is entered."""
    if recipe.states.backend == "transformers":
        from drafthead.generation.harvest_transformers import transformers_harvester

        return transformers_harvester(recipe, spec)
    return _vllm_harvester(recipe, spec)


def run_jobs(recipe: Recipe, spec: TargetSpec, jobs: Sequence[ShardJob]) -> None:
    """Harvest shards with one start of the recipe's backend."""
    with backend(recipe, spec) as harvester:
        harvest_jobs(harvester, jobs)


def harvest_jobs(harvester: Harvester, jobs: Sequence[ShardJob]) -> None:
    """Harvest shards and see that they are on disk."""
    with progress_bar(sum(len(job.responses) for job in jobs), "harvesting", "seq") as bar:
        for number, job in enumerate(jobs, 1):
            bar.set_postfix_str(f"shard {number} of {len(jobs)}", refresh=False)
            harvester.harvest(job, bar)
        harvester.finish()
    check_written(jobs)


def check_written(jobs: Sequence[ShardJob]) -> None:
    """See that the engines left what they were asked for.

    Raises:
        ValueError: a shard is not there.
    """
    if lacking := unwritten(jobs):
        raise ValueError(
            f"the engines returned but {len(lacking)} of {len(jobs)} shards were not written, "
            f"{lacking[0].path} first; run the same command again"
        )


class _VllmHarvester:
    def __init__(self, llm: Any):
        self._llm = llm

    def harvest(self, job: ShardJob, bar: tqdm) -> None:
        from vllm import SamplingParams

        from drafthead.serving.engine import generate

        params = [
            SamplingParams(
                temperature=0.0, max_tokens=1, detokenize=False, extra_args={"kv_transfer_params": slot.to_params()}
            )
            for slot in job.slots()
        ]
        generate(self._llm, job.texts(), params, bar)
        check_written_states(self._llm, wait=False)

    def finish(self) -> None:
        check_written_states(self._llm, wait=True)


@contextmanager
def _vllm_harvester(recipe: Recipe, spec: TargetSpec) -> Iterator[Harvester]:
    from drafthead.serving.engine import import_vllm, offline_engine

    import_vllm()  # before the connector, which is made of vLLM's classes
    from drafthead.serving.connector import harvest_engine_options

    target = recipe.target
    options = harvest_engine_options(spec, target.revision, target.tap_ids, target.dtype, recipe.states.format)
    with offline_engine(recipe, prefix_caching=False, log_stats=False, **options) as llm:
        yield _VllmHarvester(llm)
