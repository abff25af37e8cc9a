"""Collects captured rows and writes a shard of the state store as soon as all its sequences are there.

Every backend passes a sequence's rows together with its slot: which shard, which position in it. The order of arrival
therefore does not matter, and a shard's bytes depend on its sequences alone. One background thread writes, so that the
engine computes the next shard meanwhile; a second shard waits for the first, which bounds memory to about three shards.
The thread computes argmax and lse too, a product with lm_head for every teacher row, on CUDA on a stream of its own.
The alternative, both in the engine's step, stalls it for as long as a gigabyte takes to reach the disk.

Shapes: T tokens, C captured boundaries (the aux layers and L, ascending), H hidden.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drafthead.data.shard import Format, StateSequence, first_teacher_row, write_shard
from drafthead.target.pieces import TargetHead


@dataclass(frozen=True)
class ShardSlot:
    """Where a sequence belongs, and which of its tokens the target generated.

    Attributes:
        path: of the shard, as text for vLLM's RPC; one engine can fill several stores.
        position: place of the sequence in the shard.
        num_sequences: how many sequences the shard has.
        prompt_id: the prompt's id.
        num_prompt_tokens: leading tokens with loss mask `prompt_mask`.
        num_response_tokens: tokens with loss mask 1; any further ones (the continuation) have 0.
        prompt_mask: 0, or LEARNED_PROMPT.
    """

    path: str
    position: int
    num_sequences: int
    prompt_id: str
    num_prompt_tokens: int
    num_response_tokens: int
    prompt_mask: int = 0


class KeptRows(dict[str, list[Tensor]]):
    """Rows of texts that have no slot yet, in host memory by the name of their request.

    While an engine generates, neither the length of a response is known nor its slot, nor whether the recipe drops it.
    The last token of a response is never fed to the target, so it has no row: zeros take its place. No drafter reads
    that row, since no token follows it.
    """

    def add(self, name: str, start: int, rows: Tensor) -> None:
        """Take over rows (n, C, H) of the tokens from `start` on; 0 begins a sequence anew."""
        if start == 0:
            self[name] = []
        self[name].append(rows)

    def take(self, name: str, num_tokens: int) -> Tensor:
        """(T, C, H): the rows of a sequence of that many tokens, the last one zero; they are kept no longer.

        Raises:
            ValueError: other rows were captured than the sequence's.
        """
        rows = self.pop(name, [])
        found = sum(len(part) for part in rows)
        if found not in (num_tokens - 1, num_tokens) or not rows:
            raise ValueError(
                f"{name}: states of {found} tokens were captured for a sequence of {num_tokens}; this vLLM computes or "
                "orders steps differently, set states.backend=transformers and states.one_pass=false"
            )
        if found < num_tokens:
            rows.append(torch.zeros_like(rows[-1][:1]))
        return torch.cat(rows)


class SideStream:
    """Where work on a GPU goes on beside the engine's next step; elsewhere everything happens at once."""

    _stream: torch.cuda.Stream | None = None

    @contextmanager
    def beside(self, device: torch.device, rows: Tensor | None = None) -> Iterator[None]:
        """Inside, work on a device is queued behind what was queued there before, and nothing waits for it.

        Args:
            device: on which it is done.
            rows: on that device; their memory is not given to somebody else before it is done.
        """
        if device.type != "cuda":
            yield
            return
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
        self._stream.wait_stream(torch.cuda.current_stream(device))
        if rows is not None:
            rows.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            yield

    def wait(self) -> None:
        """Return when all of it is done."""
        if self._stream is not None:
            self._stream.synchronize()


def to_host(states: Tensor) -> Tensor:
    """A contiguous copy in host memory; from a GPU it is complete only when its stream has come so far."""
    if not states.is_cuda:
        return states.cpu().contiguous()
    out = torch.empty(states.shape, dtype=states.dtype, pin_memory=True)
    return out.copy_(states.contiguous(), non_blocking=True)


class ShardWriter:
    """Turns captured rows into shards."""

    def __init__(
        self, aux_layer_ids: tuple[int, ...], num_layers: int, head: TargetHead, number_format: Format = "bf16"
    ):
        """
        Args:
            aux_layer_ids: aux layers to keep, ascending.
            num_layers: L; rows at boundary L are always captured and give argmax and lse.
            head: the target's final norm and lm_head.
            number_format: of the aux layers on disk.
        """
        self._format = number_format
        self._num_layers = num_layers
        self._aux_layer_ids = aux_layer_ids
        self._num_boundaries = len({*aux_layer_ids, num_layers})
        self._head = head
        self._pending: dict[Path, dict[int, Future[StateSequence]]] = {}
        # The number of threads is set for this thread alone; a team of them would fight the engine's for its cores.
        self._thread = ThreadPoolExecutor(1, "shard-writer", torch.set_num_threads, (1,))
        self._writing = self._thread.submit(lambda: None)  # the shard before
        self._side = SideStream()

    def add(self, slot: ShardSlot, input_ids: Tensor, rows: Tensor) -> None:
        """Take over one sequence; the last one of a shard starts the writing.

        Args:
            slot: where it belongs.
            input_ids: (T,) the tokens the rows were computed from.
            rows: (T, C, H) in host memory; owned by the writer from here on.

        Raises:
            ValueError: rows and tokens disagree.
            Exception: whatever an earlier shard's writing raised.
        """
        if tuple(rows.shape[:2]) != (input_ids.shape[0], self._num_boundaries):
            raise ValueError(
                f"prompt {slot.prompt_id}: captured rows have shape {tuple(rows.shape)}, wanted "
                f"({input_ids.shape[0]} tokens, {self._num_boundaries} boundaries, H)"
            )
        path = Path(slot.path)
        shard = self._pending.setdefault(path, {})
        mask = torch.zeros(input_ids.shape[0], dtype=torch.uint8)
        mask[: slot.num_prompt_tokens] = slot.prompt_mask
        mask[slot.num_prompt_tokens : slot.num_prompt_tokens + slot.num_response_tokens] = 1
        first = first_teacher_row(mask)

        def sequence() -> StateSequence:
            last_hidden = rows[first:, -1].contiguous()
            with self._side.beside(self._head.device):
                argmax, lse = self._head.stats(last_hidden)
            aux = {layer_id: rows[:, column].contiguous() for column, layer_id in enumerate(self._aux_layer_ids)}
            return StateSequence(slot.prompt_id, input_ids.to(torch.int32), mask, aux, last_hidden, argmax, lse)

        shard[slot.position] = self._thread.submit(sequence)
        if len(shard) == slot.num_sequences:
            del self._pending[path]
            self._writing.result()
            self._writing = self._thread.submit(self._write, path, [shard[i] for i in range(slot.num_sequences)])

    def _write(self, path: Path, sequences: list[Future[StateSequence]]) -> None:
        """On the thread, which works in order of submission: the sequences are computed by now."""
        if not path.exists():  # another worker may have been given the same shard, and published it already
            write_shard(path, [s.result() for s in sequences], self._num_layers, self._format)

    def finish(self) -> None:
        """Wait until everything is on disk.

        Raises:
            ValueError: a shard is still incomplete.
            Exception: whatever the writing raised.
        """
        self._writing.result()
        if self._pending:
            path, sequences = next(iter(self._pending.items()))
            raise ValueError(f"{path} is incomplete: only {len(sequences)} of its sequences arrived")

    def close(self) -> None:
        """End the thread; what it is writing is finished first."""
        self._thread.shutdown()
