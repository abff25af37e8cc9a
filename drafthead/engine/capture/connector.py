"""The hidden-state connector: from vLLM's cache-only layer straight into shards of the state store.

vLLM's method `extract_hidden_states` keeps the captured boundaries of every token in a paged cache beside the
KV cache. Rows are copied at the end of a step that computed them: nothing outlives the request, no block is held
back, and it is the same on CPU and CUDA. Given up: overlap of the device-to-host copy with the next step (about 5 ms
for 1,000 tokens of gpt-oss-120b); side streams and pinned buffers would buy that back. vLLM's own example writes one
file per request and needs CUDA.

A request takes part when its sampling parameters carry `extra_args={"kv_transfer_params": ...}`:

- `slot.to_params()`: a finished text, read as a prompt. Its rows are copied once, in the step that computes its last
  token, and go to that place in a shard.
- `{"keep": NAME}`: a prompt that is being answered. The rows of every step are kept in host memory under that name,
  until `harvest_store` says which texts go where, and the others are forgotten.

The worker that is rank 0 of its tensor-parallel group writes; the others hold the same rows and stay idle.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer import get_kv_transfer_group
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.v1.core.sched.output import SchedulerOutput

from drafthead.data.store import Format
from drafthead.engine.capture.kept_rows import KeptRows
from drafthead.engine.capture.shard_writer import ShardSlot, ShardWriter
from drafthead.target.pieces import TargetHead, TargetSpec, captured_ids

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

_LAYER = "cache_only_layers"  # vLLM's name of the module that owns the paged cache of hidden states


def harvest_engine_options(
    spec: TargetSpec, revision: str | None, aux_layer_ids: tuple[int, ...], dtype: str, number_format: Format = "bf16"
) -> dict[str, Any]:
    """Keyword arguments that turn `offline_engine` into a harvester."""
    boundaries = list(captured_ids(spec, aux_layer_ids))
    return {
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": boundaries}},
        },
        "kv_transfer_config": {
            "kv_connector": "HiddenStatesConnector",
            "kv_connector_module_path": "drafthead.engine.capture.connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {
                "target": spec.name,
                "revision": revision,
                "num_layers": spec.num_layers,
                "aux_layer_ids": list(aux_layer_ids),
                "dtype": dtype,
                "format": number_format,
            },
        },
        "worker_extension_cls": "drafthead.engine.capture.connector.HarvestWorker",
        # A step scheduled ahead of the last one's outcome could run past the length up to which vLLM captures.
        "async_scheduling": False,
    }


class HarvestWorker:
    """Methods added to vLLM's worker, called through `LLM.collective_rpc`."""

    def harvest_error(self, wait: bool) -> str | None:
        """What went wrong while collecting or writing, if anything; `wait` for the disk first."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, HiddenStatesConnector)
        return connector.error(wait)

    def harvest_store(self, places: list[dict[str, Any]], texts: list[list[int]]) -> str | None:
        """Send kept answers to their places (`ShardSlot.to_params`), and forget all others."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, HiddenStatesConnector)
        return connector.store_kept([ShardSlot(**place) for place in places], texts)


@dataclass
class _Request:
    """What the scheduler side remembers of a request.

    Attributes:
        block_ids: of its rows.
        slot: where a finished text goes; None for an answer.
        token_ids: the finished text.
        keep: name of an answer.
        copied: rows of an answer that were copied.
    """

    block_ids: list[int]
    slot: ShardSlot | None = None
    token_ids: list[int] = field(default_factory=list)
    keep: str = ""
    copied: int = 0


@dataclass
class _Rows:
    """Rows `start` to `stop` of an answer, and the blocks that hold them from position 0 on."""

    keep: str
    start: int
    stop: int
    block_ids: list[int]


@dataclass
class _Metadata(KVConnectorMetadata):
    """From scheduler to worker: texts whose last token this step computes, and the rows it computes of answers."""

    complete: list[_Request] = field(default_factory=list)
    rows: list[_Rows] = field(default_factory=list)


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Store-only connector; see the module's docstring."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig"):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        owners = [i for i, group in enumerate(groups) if any(_LAYER in name for name in group.layer_names)]
        if len(owners) != 1:
            raise ValueError(
                f"{len(owners)} KV cache groups hold hidden states, wanted 1: "
                "use this connector with the speculative method extract_hidden_states"
            )
        self._group = owners[0]
        self._block_size = groups[self._group].kv_cache_spec.block_size
        self._requests: dict[str, _Request] = {}  # scheduler side
        self._cache: Tensor | None = None  # worker side, (blocks, C, block_size, H)
        self._writer: ShardWriter | None = None
        self._kept = KeptRows()
        self._error: str | None = None

    # Scheduler side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing is ever loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is ever loaded."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> _Metadata:
        """Follow block tables, and tell the worker which rows this step computes."""
        metadata = _Metadata()
        for new in scheduler_output.scheduled_new_reqs:
            params = (new.sampling_params.extra_args or {}).get("kv_transfer_params") if new.sampling_params else None
            if params:
                assert new.prompt_token_ids is not None
                blocks = list(new.block_ids[self._group])
                self._requests[new.req_id] = (
                    _Request(blocks, keep=params["keep"])
                    if "keep" in params
                    else _Request(blocks, ShardSlot(**params), list(new.prompt_token_ids))
                )
                self._collect(new.req_id, new.num_computed_tokens, scheduler_output, metadata)
        cached = scheduler_output.scheduled_cached_reqs
        for req_id, blocks_of, computed in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            if request := self._requests.get(req_id):
                if req_id in cached.resumed_req_ids:  # preempted: starts again with blocks of its own
                    request.block_ids.clear()
                request.block_ids.extend(blocks_of[self._group] if blocks_of else ())
                self._collect(req_id, computed, scheduler_output, metadata)
        return metadata

    def _collect(self, req_id: str, computed: int, scheduler_output: SchedulerOutput, metadata: _Metadata) -> None:
        after = computed + scheduler_output.num_scheduled_tokens[req_id]
        request = self._requests[req_id]
        if request.slot is not None:
            if after >= len(request.token_ids):
                metadata.complete.append(self._requests.pop(req_id))
            return
        # Drafts may be turned down; what a preempted request computes a second time is here already.
        after -= len(scheduler_output.scheduled_spec_decode_tokens.get(req_id, ()))
        if after > request.copied:
            metadata.rows.append(_Rows(request.keep, request.copied, after, list(request.block_ids)))
            request.copied = after

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        """Blocks may be freed at once: the rows were copied in the steps that computed them."""
        self._requests.pop(request.request_id, None)
        return False, None

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Find the cache of hidden states, and load what argmax and lse need."""
        if get_tensor_model_parallel_rank() != 0:
            return
        self._cache = next(cache for name, cache in kv_caches.items() if _LAYER in name)
        if self._cache.shape[2] != self._block_size:
            raise ValueError(
                f"the cache of hidden states has blocks of {self._cache.shape[2]} tokens but the scheduler counts "
                f"in blocks of {self._block_size}: this vLLM lays it out differently, rows would be wrong"
            )
        options = self._kv_transfer_config.kv_connector_extra_config
        head = TargetHead.load(options["target"], options["revision"], options["dtype"], self._cache.device)
        self._writer = ShardWriter(
            tuple(options["aux_layer_ids"]),
            options["num_layers"],
            head,
            options["format"],
            aside=not self._cache.is_cuda,
        )

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Nothing is ever loaded."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is ever loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Rows are taken at the end of the step, when all boundaries are there."""

    def wait_for_save(self) -> None:
        """Copy the rows that this step completed; vLLM calls it after the cache is written."""
        if self._writer is None or self._cache is None or self._error:
            return
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, _Metadata)
        try:
            for request in metadata.complete:
                assert request.slot is not None
                rows = self._rows(self._cache, request)
                self._writer.add(request.slot, torch.tensor(request.token_ids, dtype=torch.int32), rows)
            if metadata.rows:
                self._keep(self._cache, metadata.rows)
        except Exception as error:  # an exception here kills the engine and hides its own message
            self._error = f"{type(error).__name__}: {error}"

    def _rows(self, cache: Tensor, request: _Request) -> Tensor:
        """(T, C, H): a copy of the request's rows."""
        num_tokens = len(request.token_ids)
        num_blocks = -(-num_tokens // self._block_size)
        blocks = torch.tensor(request.block_ids[:num_blocks], device=cache.device)
        return cache[blocks].transpose(1, 2).flatten(0, 1)[:num_tokens]  # (blocks, size, C, H) -> (T, C, H)

    def _keep(self, cache: Tensor, wanted: list[_Rows]) -> None:
        """Rows of all answers in one copy: a decode step has one row of each."""
        size = self._block_size
        positions = [range(w.start, w.stop) for w in wanted]
        blocks = torch.tensor([w.block_ids[t // size] for w, span in zip(wanted, positions, strict=True) for t in span])
        offsets = torch.tensor([t % size for span in positions for t in span])
        rows = cache[blocks.to(cache.device), :, offsets.to(cache.device)].cpu()  # (n, C, H)
        for w, part in zip(wanted, rows.split([len(span) for span in positions]), strict=True):
            self._kept.add(w.keep, w.start, part)

    def store_kept(self, slots: list[ShardSlot], texts: list[list[int]]) -> str | None:
        """Hand kept answers to the writer and forget the others; the first error so far."""
        if self._writer is None or self._error:
            return self._error
        try:
            for slot, text in zip(slots, texts, strict=True):
                rows = self._kept.take(slot.prompt_id, len(text))
                self._writer.add(slot, torch.tensor(text, dtype=torch.int32), rows)
        except Exception as error:  # reported by the caller, who sees the user
            self._error = f"{type(error).__name__}: {error}"
        self._kept.clear()
        return self._error

    def error(self, wait: bool) -> str | None:
        """The first error so far; `wait` until all collected shards are on disk."""
        if wait and self._writer is not None and not self._error:
            try:
                self._writer.finish()
            except Exception as error:  # reported by the caller, who sees the user
                self._error = f"{type(error).__name__}: {error}"
        return self._error

    def shutdown(self) -> None:
        """End the writing thread and let go of the cache."""
        if self._writer is not None:
            self._writer.close()
        self._writer = self._cache = None
