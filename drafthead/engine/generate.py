"""vLLM engines in this process: token ids in, token ids out, and the target's hidden states where they are wanted.

The prompt is given as token ids, and the ids that were generated come back, the stop token included: no chat template
and no tokenizer changes anything on the way.

A `CapturingEngine` reads finished texts as prompts and keeps the states of every request with a name, until `store`
gives them their shards. What capturing costs on the device: the captured boundaries of every token in flight lie beside
its KV cache, so fewer requests fit. On the host: the rows of all texts between two calls of `store`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from drafthead.config import Recipe
from drafthead.engine.offline import offline_engine, on_cpu
from drafthead.engine.shard_writer import SequenceSpec
from drafthead.progress import wait_until
from drafthead.target.pieces import SCORED_ROWS, compute_dtype
from drafthead.target.spec import TargetSpec, captured_ids

if TYPE_CHECKING:
    from vllm import LLM

BATCHED_TOKENS = 16_384  # of a step, vLLM's own choice on GPUs of 70 GiB and more; 8,192 on smaller ones
_FLOAT32 = 4  # bytes
_CONNECTOR = "drafthead.engine.connector"


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to continue.

    Attributes:
        prompt_ids: token ids of the prompt.
        max_tokens: length limit of the response.
        temperature: 0 is greedy.
        seed: seed of the sampling; None where nothing is sampled.
        ignore_stop: generate past stop tokens.
        keep: name under which captured states of this sequence are kept; "" keeps none.
        stop_ids: token ids that end the response, beside those of the target.
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    temperature: float
    seed: int | None
    ignore_stop: bool = False
    keep: str = ""
    stop_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Generation:
    """Generated token ids, stop token included, why they end ("stop" or "length"), and vLLM's counters of the drafts
    where per_request_spec_decode_metrics keeps them."""

    token_ids: list[int]
    finish_reason: str
    counters: Any = None


class Engine:
    """A running vLLM engine that generates."""

    def __init__(self, llm: "LLM"):
        self._llm = llm

    def reset_cache(self) -> None:
        """Drop cached prefixes, so that what follows does not depend on earlier requests.

        In bf16 a prefix from the cache and one computed in a batch round differently: a resumed stage would generate
        other tokens than an undisturbed one.
        """
        wait_until(self._llm.reset_prefix_cache, "vLLM to reset its prefix cache")

    def generate(self, requests: Sequence[GenerationRequest], bar: tqdm | None = None) -> list[Generation]:
        """One generation per request, in their order; `bar` advances by one for each."""
        from vllm import SamplingParams, TokensPrompt

        params = [
            SamplingParams(
                temperature=request.temperature,
                seed=request.seed,
                max_tokens=request.max_tokens,
                ignore_eos=request.ignore_stop,
                stop_token_ids=list(request.stop_ids),
                detokenize=False,
                extra_args={"kv_transfer_params": {"keep": request.keep}} if request.keep else None,
            )
            for request in requests
        ]
        prompts = [TokensPrompt(prompt_token_ids=list(request.prompt_ids)) for request in requests]
        self._llm.enqueue(prompts, params, use_tqdm=False)
        ended: list[Any] = []
        while self._llm.llm_engine.has_unfinished_requests():  # LLM.wait_for_completion, with the stage's bar
            ended += (new := [output for output in self._llm.llm_engine.step() if output.finished])
            if bar is not None and new:
                bar.update(len(new))
        outputs = [output.outputs[0] for output in sorted(ended, key=lambda output: int(output.request_id))]
        return [Generation(list(o.token_ids), str(o.finish_reason), o.spec_decode_metrics) for o in outputs]


class CapturingEngine(Engine):
    """Keeps the states of named requests, and stores them: a worker of `drafthead.engine.running` for shards."""

    def make(self, job: Any, bar: tqdm) -> None:
        """Read the texts of a shard (`generation.shards.ShardJob`) as prompts, and store their states."""
        sequences = job.sequences()
        self.generate([GenerationRequest(s.token_ids, 1, 0.0, None, keep=s.id) for s in sequences], bar)
        self.store([(job.path, sequences)])

    def store(self, shards: Sequence[tuple[Path, list[SequenceSpec]]], finish: bool = False) -> None:
        """Write the states of these sequences to shards, in the background; those of all other sequences are dropped.

        Args:
            shards: path and sequences of each shard; the id of a sequence is the `keep` of its request.
            finish: wait until every shard is on disk.

        Raises:
            ValueError: states are missing, or an earlier shard could not be written.
        """
        by_path = [(str(path), sequences) for path, sequences in shards]
        for error in self._llm.collective_rpc("harvest_store", args=(by_path, finish)):
            if error:
                raise ValueError(f"a shard could not be written: {error}")

    def finish(self) -> None:
        """Wait until every shard is on disk; raises ValueError when one could not be written."""
        self.store([], finish=True)


@contextmanager
def capturing_engine(recipe: Recipe, spec: TargetSpec) -> Iterator[CapturingEngine]:
    """The recipe's target in an engine that captures states, which is gone when the block ends.

    Args:
        recipe: recipe; its target, engine, head and states sections are read.
        spec: shape of the target.
    """
    options = {"enable_prefix_caching": False, "disable_log_stats": True, **capture_options(recipe, spec)}
    if not on_cpu():
        from vllm.platforms import current_platform  # asks NVML: CUDA is not initialised before the engine forks

        share = reserved_bytes(recipe, spec) / current_platform.get_device_total_memory()
        options["gpu_memory_utilization"] = recipe.engine.gpu_memory_utilization - share
    with offline_engine(recipe, **options) as llm:
        yield CapturingEngine(llm)


def reserved_bytes(recipe: Recipe, spec: TargetSpec) -> int:
    """Of a GPU beside the engine, which sizes its cache before the connector exists: the target's head, logits of the
    rows that it scores at a time and their exponentials, and the captured rows of two steps."""
    boundaries = len(captured_ids(spec, recipe.target.aux_layer_ids))
    tokens = recipe.engine.max_num_batched_tokens or BATCHED_TOKENS
    width = compute_dtype(spec, recipe.target.dtype).itemsize
    head = spec.vocab_size * (spec.hidden_size * width + 2 * SCORED_ROWS * _FLOAT32)
    return head + 2 * tokens * boundaries * spec.hidden_size * width


def capture_options(recipe: Recipe, spec: TargetSpec) -> dict[str, Any]:
    """Keyword arguments that make `offline_engine` capture the boundaries that the recipe's head needs."""
    target = recipe.target
    boundaries = captured_ids(spec, target.aux_layer_ids)
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
