"""Engines that capture the target's hidden states: over finished texts, or while they generate responses (one pass).

Tokens of the one-pass engine are those of a plain engine (see connector.WithoutDrafts). Its states are the ones that
the response was sampled from: of the prompt from the prefill, of the response from decode steps, where a harvest of the
finished text computes all of them in prefill. The kernels round differently, in bf16 about as much as two batches of
one kernel do.

What it costs on the device: the captured boundaries of every token in flight lie beside its KV cache, so fewer
requests fit. On the host: the rows of all responses between two calls of `store`.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from drafthead.config import Recipe
from drafthead.drafters.registry import drafter_of
from drafthead.engine.capture.shard_writer import ShardSlot
from drafthead.engine.generate import EngineGenerator
from drafthead.target.pieces import SCORED_ROWS, TargetSpec, compute_dtype

if TYPE_CHECKING:
    from vllm import LLM

BATCHED_TOKENS = 16_384  # of a step, vLLM's own choice on GPUs of 70 GiB and more; 8,192 on smaller ones
_FLOAT32 = 4  # bytes
_CONNECTOR = "drafthead.engine.capture.connector"


class CapturingEngine(EngineGenerator):
    """Generates responses, and stores their states once their places in the store are known."""

    keeps_states = True

    def store(self, slots: Sequence[ShardSlot], texts: Sequence[list[int]]) -> None:
        """Write the states of these texts to shards, in the background; those of all other texts are dropped.

        Args:
            slots: where each text goes; its prompt_id is the name that the request had.
            texts: prompt and response of each, in the order of the slots.

        Raises:
            ValueError: states are missing, or an earlier shard could not be written.
        """
        params = [slot.to_params() for slot in slots]
        _raise_first(self._llm.collective_rpc("harvest_store", args=(params, [list(text) for text in texts])))

    def finish(self) -> None:
        """Wait until every shard is on disk; raises ValueError when one could not be written."""
        check_written_states(self._llm, wait=True)


@contextmanager
def capturing_engine(recipe: Recipe, spec: TargetSpec) -> Iterator[CapturingEngine]:
    """The recipe's target in an engine of this process that generates and captures states while it does."""
    more: dict[str, Any] = {"seeded": True, "scheduler_cls": f"{_CONNECTOR}.WithoutDrafts"}
    if _runs_v2():
        # No drafts at any batch size: CUDA graphs of decode steps are captured for one token of each request, not for
        # two. V1 does not know this for captured states, and decodes without full graphs.
        speculative = harvest_engine_options(recipe, spec)["speculative_config"]
        more["speculative_config"] = speculative | {"num_speculative_tokens_per_batch_size": [(1, 1, 0)]}
    with harvest_engine(recipe, spec, **more) as llm:
        yield CapturingEngine(llm)


def _runs_v2() -> bool:
    """Whether vLLM takes its model runner V2: on GPUs, unless the user says otherwise."""
    from drafthead.engine.offline import on_cpu

    if "VLLM_USE_V2_MODEL_RUNNER" in os.environ:
        return os.environ["VLLM_USE_V2_MODEL_RUNNER"] == "1"
    return not on_cpu()


@contextmanager
def harvest_engine(recipe: Recipe, spec: TargetSpec, **more: Any) -> Iterator["LLM"]:
    """The recipe's target with the connector, in an engine of this process, which is gone when the block ends.

    Args:
        recipe: target, engine, head and states sections are used.
        spec: of the target.
        more: further arguments of `offline_engine`, or others than a harvester's.
    """
    from drafthead.engine.offline import offline_engine, on_cpu  # vLLM takes seconds to import

    # Without cached prefixes every row is computed by the request it belongs to.
    options = {"enable_prefix_caching": False, "disable_log_stats": True, **harvest_engine_options(recipe, spec)}
    if not on_cpu():
        from vllm.platforms import current_platform  # asks NVML: CUDA is not initialised before the engine forks

        share = reserved_bytes(recipe, spec) / current_platform.get_device_total_memory()
        options["gpu_memory_utilization"] = recipe.engine.gpu_memory_utilization - share
    with offline_engine(recipe, **{**options, **more}) as llm:
        yield llm


def reserved_bytes(recipe: Recipe, spec: TargetSpec) -> int:
    """Of a GPU beside the engine, which sizes its cache before the connector exists: the target's head, logits of the
    rows that it scores at a time and their exponentials, and the captured rows of two steps."""
    boundaries = len(drafter_of(recipe.head).needs(spec, recipe.target.aux_layer_ids))
    tokens = recipe.engine.max_num_batched_tokens or BATCHED_TOKENS
    width = compute_dtype(spec, recipe.target.dtype).itemsize
    head = spec.vocab_size * (spec.hidden_size * width + 2 * SCORED_ROWS * _FLOAT32)
    return head + 2 * tokens * boundaries * spec.hidden_size * width


def harvest_engine_options(recipe: Recipe, spec: TargetSpec) -> dict[str, Any]:
    """Keyword arguments that turn `offline_engine` into a harvester of the boundaries that the recipe's head needs."""
    target = recipe.target
    boundaries = drafter_of(recipe.head).needs(spec, target.aux_layer_ids)
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(boundaries)}},
        },
        "kv_transfer_config": {
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": _CONNECTOR,
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "target": spec.name,
                "revision": target.revision,
                "num_layers": spec.num_layers,
                "aux_layer_ids": list(target.aux_layer_ids),
                "dtype": target.dtype,
                "format": recipe.states.format,
            },
        },
        "worker_extension_cls": f"{_CONNECTOR}.HarvestWorker",
        # A step scheduled ahead of the last one's outcome could run past the length up to which vLLM captures.
        "async_scheduling": False,
    }


def check_written_states(llm: "LLM", wait: bool) -> None:
    """Raise ValueError when a worker of a harvesting engine met an error; `wait` for the disk first."""
    _raise_first(llm.collective_rpc("harvest_error", args=(wait,)))


def _raise_first(errors: list[str | None]) -> None:
    for error in errors:
        if error:
            raise ValueError(f"a shard could not be written: {error}")
