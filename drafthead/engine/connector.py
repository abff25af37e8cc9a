"""The hidden-state connector: from vLLM's cache-only layer straight into shards of the state store.

vLLM's method `extract_hidden_states` keeps the captured boundaries of every token in a paged cache beside the
KV cache. Rows are taken out of it at the end of a step that computed them: nothing outlives the request, no block is
held back, and it is the same on CPU and CUDA. On CUDA they go to the host during the next step, which ends only when
they are there: so those of two steps lie on the device at most, and `reserved_bytes` sets room aside. vLLM's own
example writes one file per request and needs CUDA.

A request takes part when its sampling parameters carry `extra_args={"kv_transfer_params": {"keep": NAME}}`. The rows of
every step are kept in host memory under that name. `harvest_store` writes those of the texts it is given, and drops all
others. Such a request generates one token, so that no draft of `extract_hidden_states` is ever scheduled.

The worker that is rank 0 of its tensor-parallel group writes; the others hold the same rows and stay idle.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
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

from drafthead.engine.shard_writer import KeptRows, SequenceSpec, ShardWriter, on_side_stream, side_stream, to_host
from drafthead.target.pieces import TargetHead

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig

_LAYER = "cache_only_layers"  # vLLM's name of the module that owns the paged cache of hidden states


class HarvestWorker:
    """Methods added to vLLM's worker, called through `LLM.collective_rpc`."""

    def harvest_store(self, shards: list[tuple[str, list[tuple]]], finish: bool) -> str | None:
        """`HiddenStatesConnector.store`; vLLM's RPC may hand over plain sequences for the specs."""
        connector = get_kv_transfer_group()
        assert isinstance(connector, HiddenStatesConnector)
        return connector.store([(path, [SequenceSpec(*entry) for entry in specs]) for path, specs in shards], finish)


@dataclass
class _Request:
    """A request whose rows are captured.

    Attributes:
        keep: name under which the rows are kept.
        block_ids: cache blocks that hold the request's rows, from position 0 on.
        start, stop: the rows to copy at the end of this step, [start, stop).
    """

    keep: str
    block_ids: list[int]
    start: int = 0
    stop: int = 0


@dataclass
class _Metadata(KVConnectorMetadata):
    """From scheduler to worker: the requests that have rows to copy at the end of this step."""

    rows: list[_Request] = field(default_factory=list)


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Store-only connector; see the module's docstring."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: "KVCacheConfig"):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        (self._group,) = (i for i, group in enumerate(groups) if any(_LAYER in name for name in group.layer_names))
        self._block_size = groups[self._group].kv_cache_spec.block_size
        self._requests: dict[str, _Request] = {}  # scheduler side
        self._cache: Tensor | None = None  # worker side, (blocks, C, block_size, H)
        self._writer: ShardWriter | None = None
        self._kept = KeptRows()
        self._stream: torch.cuda.Stream | None = None
        self._arriving: list[tuple[_Request, Tensor]] = []  # rows on their way to the host
        self._error: str | None = None

    # Scheduler side

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Nothing is ever loaded."""
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Nothing is ever loaded."""

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> _Metadata:
        """Follow block tables, and tell the worker which rows to copy at the end of this step."""
        computed = {}  # before this step, by request
        for new in scheduler_output.scheduled_new_reqs:
            params = (new.sampling_params.extra_args or {}).get("kv_transfer_params") if new.sampling_params else None
            if params:
                self._requests[new.req_id] = _Request(params["keep"], list(new.block_ids[self._group]))
                computed[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        for i, req_id in enumerate(cached.req_ids):
            if request := self._requests.get(req_id):
                if req_id in cached.resumed_req_ids:  # preempted: starts again with blocks of its own
                    request.block_ids.clear()
                if blocks := cached.new_block_ids[i]:
                    request.block_ids.extend(blocks[self._group])
                computed[req_id] = cached.num_computed_tokens[i]
        metadata = _Metadata()
        for req_id, before in computed.items():
            request = self._requests[req_id]
            stop = before + scheduler_output.num_scheduled_tokens[req_id]  # without drafts: one token is generated
            if stop > request.start:  # what a preempted request computes a second time was copied before
                metadata.rows.append(replace(request, block_ids=list(request.block_ids), stop=stop))
                request.start = stop
        return metadata

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        """Blocks may be freed at once: the rows were copied in the steps that computed them."""
        self._requests.pop(request.request_id, None)
        return False, None

    # Worker side

    def register_kv_caches(self, kv_caches: dict[str, Tensor]) -> None:
        """Find the cache of hidden states, and load what argmax and lse need."""
        if get_tensor_model_parallel_rank() != 0:
            return
        cache = self._cache = next(cache for name, cache in kv_caches.items() if _LAYER in name)
        self._stream = side_stream(cache.device)
        if cache.shape[2] != self._block_size:
            raise ValueError(
                f"the cache of hidden states has blocks of {cache.shape[2]} tokens but the scheduler counts "
                f"in blocks of {self._block_size}: this vLLM lays it out differently, rows would be wrong"
            )
        options = self._kv_transfer_config.kv_connector_extra_config
        head = TargetHead.load(options["target"], options["revision"], options["dtype"], cache.device)
        layer_ids, number_format = tuple(options["aux_layer_ids"]), options["format"]
        self._writer = ShardWriter(layer_ids, options["num_layers"], head, number_format)

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
        if requests := metadata.rows:
            with self._recorded_error():
                self._keep_arrived()
                rows = self._copy(self._cache, requests)
                with on_side_stream(self._stream, rows):
                    parts = to_host(rows).split([r.stop - r.start for r in requests])
                self._arriving += zip(requests, parts, strict=True)

    def _keep_arrived(self) -> None:
        """Wait for the rows of the step before, and move them out of page-locked memory."""
        if self._stream is not None:
            self._stream.synchronize()
        for request, rows in self._arriving:
            self._kept.add(request.keep, request.start, rows.clone())
        self._arriving.clear()

    def _copy(self, cache: Tensor, requests: Sequence[_Request]) -> Tensor:
        """(n, C, H): rows `start` to `stop` of all requests, end to end."""
        positions = [torch.arange(request.start, request.stop) for request in requests]
        blocks = [torch.tensor(r.block_ids)[t // self._block_size] for r, t in zip(requests, positions, strict=True)]
        indices = torch.stack([torch.cat(blocks), torch.cat(positions) % self._block_size])
        if cache.is_cuda:
            indices = indices.pin_memory().to(cache.device, non_blocking=True)
        return cache[indices[0], :, indices[1]]

    def store(self, shards: list[tuple[str, list[SequenceSpec]]], finish: bool = False) -> str | None:
        """Pass the kept rows of shards, by path, to the writer and drop all others; the first error so far.
        `finish`: wait until all shards are on disk."""
        if self._writer is not None and not self._error:
            with self._recorded_error():
                self._keep_arrived()
                for path, sequences in shards:
                    rows = [self._kept.take(spec.id, len(spec.token_ids)) for spec in sequences]
                    self._writer.write(Path(path), sequences, rows)
                if finish:
                    self._writer.finish()
            self._kept.clear()
        return self._error

    @contextmanager
    def _recorded_error(self) -> Iterator[None]:
        """Keep an error for the next `store`: raised in here it would kill the engine."""
        try:
            yield
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"

    def shutdown(self) -> None:
        """End the writing thread and free the cache."""
        if self._writer is not None:
            self._writer.close()
        self._writer = self._cache = None
