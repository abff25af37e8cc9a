"""Collects harvested sequences and writes a shard of the state store as soon as it is whole.

Every backend hands over a sequence's rows together with its slot: which shard, which position in it. The order
of arrival therefore does not matter, and a shard's bytes depend on its sequences alone. Writing happens on one
background thread, so that the engine computes the next shard meanwhile; a second shard waits for the first,
which bounds memory to about three shards. The alternative, writing in the engine's step, stalls it for as long
as a gigabyte takes to reach the disk.

On CPU an engine leaves one core free (see engine.offline); the thread uses it for argmax and log-sum-exp too, which
are a product with lm_head for every row that can carry loss.

Shapes: T tokens, C captured boundaries (the aux layers and L, ascending), H hidden.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafthead.data.store import Format, StateSequence, shard_path, write_shard
from drafthead.drafters.batch import first_loss_row
from drafthead.target.pieces import TargetHead


@dataclass(frozen=True)
class ShardSlot:
    """Where a sequence belongs, and which of its tokens the target generated.

    Attributes:
        directory: of the store; one engine can fill several.
        shard: index of the shard.
        position: place of the sequence in the shard.
        num_sequences: how many sequences the shard has.
        prompt_id: the prompt's id.
        num_prompt_tokens: leading tokens with loss mask 0.
        num_response_tokens: tokens with loss mask 1; any further ones (the continuation) have 0.
    """

    directory: str
    shard: int
    position: int
    num_sequences: int
    prompt_id: str
    num_prompt_tokens: int
    num_response_tokens: int

    def to_params(self) -> dict[str, Any]:
        """As JSON values, to travel with a request."""
        return asdict(self)


class ShardWriter:
    """Turns captured rows into shards."""

    def __init__(
        self,
        aux_layer_ids: tuple[int, ...],
        num_layers: int,
        head: TargetHead,
        number_format: Format = "bf16",
        aside: bool = False,
    ):
        """
        Args:
            aux_layer_ids: aux layers to keep, ascending.
            num_layers: L; rows at boundary L are always captured and give argmax and lse.
            head: the target's final norm and lm_head.
            number_format: of the aux layers on disk.
            aside: compute argmax and lse on the writing thread, with one core.
        """
        self._format, self._aside = number_format, aside
        self._aux_layer_ids = aux_layer_ids
        self._num_layers = num_layers
        self._captured = sorted({*aux_layer_ids, num_layers})
        self._head = head
        self._pending: dict[Path, dict[int, Future[StateSequence]]] = {}
        # The number of threads is set for this thread alone; a team of them would fight the engine's for its cores.
        self._thread = ThreadPoolExecutor(1, "shard-writer", torch.set_num_threads, (1,))
        self._writing: Future[None] | None = None

    def add(self, slot: ShardSlot, input_ids: Tensor, rows: Tensor) -> None:
        """Take over one sequence; the last one of a shard starts the writing.

        Args:
            slot: where it belongs.
            input_ids: (T,) the tokens the rows were computed from.
            rows: (T, C, H) on any device; owned by the writer from here on.

        Raises:
            ValueError: rows and tokens disagree, or the position is taken.
            Exception: whatever an earlier shard's writing raised.
        """
        if tuple(rows.shape[:2]) != (input_ids.shape[0], len(self._captured)):
            raise ValueError(
                f"prompt {slot.prompt_id}: captured rows have shape {tuple(rows.shape)}, wanted "
                f"({input_ids.shape[0]} tokens, {len(self._captured)} boundaries, H)"
            )
        mask = torch.zeros(input_ids.shape[0], dtype=torch.uint8)
        mask[slot.num_prompt_tokens : slot.num_prompt_tokens + slot.num_response_tokens] = 1
        first = first_loss_row(mask) if mask.any() else len(mask)  # a prompt's logits are nobody's teacher
        last_hidden = rows[first:, self._captured.index(self._num_layers)].contiguous()
        path = shard_path(Path(slot.directory), slot.shard)
        shard = self._pending.setdefault(path, {})
        if slot.position in shard:
            raise ValueError(f"{path} position {slot.position} arrived twice (prompt {slot.prompt_id})")
        sequence = partial(
            StateSequence,
            id=slot.prompt_id,
            input_ids=input_ids.to(torch.int32),
            loss_mask=mask,
            aux={
                layer_id: rows[:, self._captured.index(layer_id)].cpu().contiguous() for layer_id in self._aux_layer_ids
            },
            last_hidden=last_hidden.cpu(),
            first_row=first,
        )
        shard[slot.position] = self._scored(sequence, last_hidden)
        if len(shard) == slot.num_sequences:
            del self._pending[path]
            self._write(path, [shard[position] for position in range(slot.num_sequences)])

    def _scored(self, sequence: Callable[..., StateSequence], last_hidden: Tensor) -> Future[StateSequence]:
        """The sequence with argmax and lse, now or soon."""

        def score() -> StateSequence:
            argmax, lse = self._head.stats(last_hidden)
            return sequence(argmax=argmax.cpu(), lse=lse.cpu())

        if self._aside:
            return self._thread.submit(score)
        done: Future[StateSequence] = Future()
        done.set_result(score())
        return done

    def finish(self) -> None:
        """Wait until everything is on disk.

        Raises:
            ValueError: a shard is still incomplete.
            Exception: whatever the writing raised.
        """
        if self._writing is not None:
            self._writing.result()
        if self._pending:
            path, sequences = next(iter(self._pending.items()))
            raise ValueError(f"{path} is incomplete: only {len(sequences)} of its sequences arrived")

    def close(self) -> None:
        """End the thread; what it is writing is finished first."""
        self._thread.shutdown()

    def _write(self, path: Path, sequences: list[Future[StateSequence]]) -> None:
        def write() -> None:  # one thread in order of submission: the sequences are done by now
            if path.exists():  # someone else was given the same work, and checksums may be taken already
                return
            write_shard(path, [s.result() for s in sequences], self._num_layers, self._format)

        if self._writing is not None:
            self._writing.result()
        self._writing = self._thread.submit(write)
