"""The ways to run a target so that its states are stored."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from tqdm import tqdm

from drafthead.config import Recipe
from drafthead.engine.capture.capturing import check_written_states, harvest_engine
from drafthead.generation.running import Task, Worker
from drafthead.generation.states.shard_jobs import ShardJob
from drafthead.target.pieces import TargetSpec


def backend(recipe: Recipe, spec: TargetSpec) -> AbstractContextManager[Worker]:
    """The recipe's way to run the target, started when the block is entered."""
    if recipe.states.backend == "transformers":
        from drafthead.generation.states.harvest_transformers import transformers_harvester

        return transformers_harvester(recipe, spec)
    return _vllm_harvester(recipe, spec)


def harvesting(recipe: Recipe, spec: TargetSpec) -> Task:
    """The task of making shards."""
    return Task(partial(backend, recipe, spec), "harvesting", "seq", "shard")


class _VllmHarvester:
    def __init__(self, llm: Any):
        self._llm = llm

    def make(self, job: ShardJob, bar: tqdm) -> None:
        from vllm import SamplingParams

        from drafthead.engine.offline import generate

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
def _vllm_harvester(recipe: Recipe, spec: TargetSpec) -> Iterator[Worker]:
    with harvest_engine(recipe, spec) as llm:
        yield _VllmHarvester(llm)
