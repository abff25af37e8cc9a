"""Turns captured rows into shards of the state store.

A backend passes all sequences of a shard at once, so a shard's bytes depend on its sequences alone. One background
thread writes, so that the engine computes the next shard meanwhile; a second shard waits for the first, which bounds
memory to about three shards. The thread computes argmax and lse too, a product with lm_head for every teacher row, on
CUDA on a stream of its own. The alternative, both in the engine's step, stalls it for as long as a gigabyte takes to
reach the disk.

Shapes: T tokens, C captured boundaries (the aux layers and L, ascending), H hidden.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from drafthead.data.shard import Format, StateSequence, first_teacher_row, write_shard
from drafthead.target.pieces import TargetHead


class SequenceSpec(NamedTuple):
    """A sequence to be stored in a shard. A tuple, because vLLM's RPC takes plain types only.

    Attributes:
        id: id of the response.
        token_ids: T token ids.
        loss_mask: T bytes, nonzero where the token is learned.
    """

    id: str
    token_ids: list[int]
    loss_mask: bytes


class KeptRows(dict[str, list[Tensor]]):
    """Rows of texts that have no shard yet, in host memory by the name of their request."""

    def add(self, name: str, start: int, rows: Tensor) -> None:
        """Take over rows (n, C, H) of the tokens from `start` on; 0 begins a sequence anew."""
        if start == 0:
            self[name] = []
        self[name].append(rows)

    def take(self, name: str, num_tokens: int) -> Tensor:
        """(T, C, H): the rows of a sequence of that many tokens; they are kept no longer.

        Raises:
            ValueError: other rows were captured than the sequence's.
        """
        rows = self.pop(name, [])
        num_captured = sum(len(part) for part in rows)
        if num_captured != num_tokens:
            raise ValueError(
                f"{name}: states of {num_captured} tokens were captured for a sequence of {num_tokens}; this vLLM "
                "computes or orders steps differently, set states.backend=transformers"
            )
        return torch.cat(rows)


def side_stream(device: torch.device) -> torch.cuda.Stream | None:
    """Where work on a GPU goes on beside the engine's next step; elsewhere everything happens at once."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None


@contextmanager
def on_side_stream(stream: torch.cuda.Stream | None, rows: Tensor | None = None) -> Iterator[None]:
    """Inside, work is queued on a side stream behind what the engine has queued, and nothing waits for it.

    Args:
        stream: side stream from `side_stream`.
        rows: tensor that the stream reads; its memory is not reused before the stream is done with it.
    """
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        if rows is not None:
            rows.record_stream(stream)
    with torch.cuda.stream(stream):
        yield


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
            number_format: number format of the aux layers on disk.
        """
        self._format = number_format
        self._num_layers = num_layers
        self._aux_layer_ids = aux_layer_ids
        self._num_boundaries = len({*aux_layer_ids, num_layers})
        self._head = head
        # The number of threads is set for this thread alone; a team of them would fight the engine's for its cores.
        self._thread = ThreadPoolExecutor(1, "shard-writer", torch.set_num_threads, (1,))
        self._writing = self._thread.submit(lambda: None)  # the shard before
        self._stream = side_stream(head.device)

    def write(self, path: Path, sequences: Sequence[SequenceSpec], rows: Sequence[Tensor]) -> None:
        """Write a shard in the background, once the one before is on disk.

        Args:
            path: path of the shard.
            sequences: sequences of the shard, in order.
            rows: (T, C, H) captured rows of each sequence in host memory; owned by the writer from here on.

        Raises:
            ValueError: rows and tokens disagree.
            Exception: whatever an earlier shard's writing raised.
        """
        for spec, captured in zip(sequences, rows, strict=True):
            if tuple(captured.shape[:2]) != (len(spec.token_ids), self._num_boundaries):
                raise ValueError(
                    f"prompt {spec.id}: captured rows have shape {tuple(captured.shape)}, wanted "
                    f"({len(spec.token_ids)} tokens, {self._num_boundaries} boundaries, H)"
                )
        self._writing.result()
        self._writing = self._thread.submit(self._write, path, sequences, rows)

    def _write(self, path: Path, sequences: Sequence[SequenceSpec], rows: Sequence[Tensor]) -> None:
        if not path.exists():  # another worker may have been given the same shard, and published it already
            captured = [self._captured(*pair) for pair in zip(sequences, rows, strict=True)]
            write_shard(path, captured, self._num_layers, self._format)

    def _captured(self, spec: SequenceSpec, rows: Tensor) -> StateSequence:
        mask = torch.tensor(list(spec.loss_mask), dtype=torch.uint8)
        first = first_teacher_row(mask)
        last_hidden = rows[first:, -1].contiguous()
        with on_side_stream(self._stream):
            argmax, lse = self._head.stats(last_hidden)
        aux = {layer_id: rows[:, column] for column, layer_id in enumerate(self._aux_layer_ids)}
        return StateSequence(
            spec.id, torch.tensor(spec.token_ids, dtype=torch.int32), mask, aux, last_hidden, argmax, lse
        )

    def finish(self) -> None:
        """Wait until everything is on disk; raises whatever the writing raised."""
        self._writing.result()

    def close(self) -> None:
        """End the thread; what it is writing is finished first."""
        self._thread.shutdown()
