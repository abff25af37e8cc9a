"""An engine that answers and keeps the target's states of what it reads and says: generation and harvest in one pass.

Tokens are those of a plain engine (see serving.capture.without_drafts). States are the ones that the answer was sampled
from: of the prompt from the prefill, of the answer from decode steps, where a harvest of the finished text computes all
of them in prefill. The kernels round differently, in bf16 about as much as two batches of one kernel do.

What it costs on the device: the captured boundaries of every token under way lie beside its KV cache, so fewer
requests fit. On the host: the rows of all answers between two calls of `store`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from drafthead.config import Recipe
from drafthead.engine.capture.shard_writer import ShardSlot
from drafthead.engine.generate import EngineGenerator
from drafthead.target.pieces import TargetSpec

if TYPE_CHECKING:
    from vllm import LLM


class CapturingEngine(EngineGenerator):
    """Answers, and stores the states of answers once their places are known."""

    keeps_states = True

    def store(self, slots: Sequence[ShardSlot], texts: Sequence[list[int]]) -> None:
        """Send the states of these texts to shards, in the background; those of all other texts are forgotten.

        Args:
            slots: where each text goes; its prompt_id is the name it was asked under.
            texts: what the engine read and said, in the order of the slots.

        Raises:
            ValueError: states are missing, or an earlier shard could not be written.
        """
        places = [slot.to_params() for slot in slots]
        _raise_first(self._llm.collective_rpc("harvest_store", args=(places, [list(text) for text in texts])))

    def finish(self) -> None:
        """Wait until every shard is on disk; raises ValueError when one could not be written."""
        check_written_states(self._llm, wait=True)


@contextmanager
def capturing_engine(recipe: Recipe, spec: TargetSpec) -> Iterator[CapturingEngine]:
    """The recipe's target in an engine of this process that answers, and keeps states while it does."""
    scheduler = "drafthead.engine.capture.without_drafts.WithoutDrafts"
    with harvest_engine(recipe, spec, seeded=True, scheduler_cls=scheduler) as llm:
        yield CapturingEngine(llm)


@contextmanager
def harvest_engine(recipe: Recipe, spec: TargetSpec, **more: Any) -> Iterator["LLM"]:
    """The recipe's target with the connector, in an engine of this process, which is gone when the block ends.

    Args:
        recipe: target, engine and states sections are used.
        spec: of the target.
        more: further arguments of `offline_engine`.
    """
    from drafthead.engine.offline import import_vllm, offline_engine

    import_vllm()  # before the connector, which is made of vLLM's classes
    from drafthead.engine.capture.connector import harvest_engine_options

    target = recipe.target
    options = harvest_engine_options(spec, target.revision, target.aux_layer_ids, target.dtype, recipe.states.format)
    # Without cached prefixes every row is computed by the request it belongs to.
    with offline_engine(recipe, enable_prefix_caching=False, disable_log_stats=True, **options, **more) as llm:
        yield llm


def check_written_states(llm: "LLM", wait: bool) -> None:
    """See that the workers of a harvesting engine met no error; `wait` for the disk first.

    Raises:
        ValueError: they did.
    """
    _raise_first(llm.collective_rpc("harvest_error", args=(wait,)))


def _raise_first(errors: list[str | None]) -> None:
    for error in errors:
        if error:
            raise ValueError(f"a shard could not be written: {error}")
