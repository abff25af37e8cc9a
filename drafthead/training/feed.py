"""Where a run's states come from: a whole store, or a spool that the harvester fills meanwhile.

The loop tells its feed where it stands; a whole store needs none of it. A spool makes the trainer
wait for what is not written yet, and delete what it no longer needs. A shard is deleted only when a checkpoint covers
everything trained from it; so when the harvester has no room left, or the trainer is about to wait, a checkpoint is
written between the regular ones. It does not alter training. Ranks decide alike: each looks at the directory itself
(on a shared file system they may not see the same at once), and what any of them misses, all wait for.

    step                 0   1   2 | 3   4   5 | 6          spool of 4 shards, groups of 2
    reads of shards     0,1 1,0 0,1|2,3 3,2 2,3|4,5
    first needed         0   0   0 | 2   2   2 | 4          a checkpoint at step 3 frees shards 0 and 1
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from drafthead.data.packing import Window
from drafthead.data.spool import SpooledStates
from drafthead.drafters.batch import PackedBatch
from drafthead.progress import wait_until

_HARVEST = "python data_gen/harvest.py RECIPE"


class Feed:
    """A whole store: all states are there, and stay."""

    def wants_checkpoint(self, step: int) -> bool:
        """Whether a checkpoint before this step would unblock the harvester or this trainer; every rank asks."""
        return False

    def wait(self, step: int) -> None:
        """Return when every rank can read the step's states; every rank asks."""

    def ready(self, step: int) -> bool:
        """Whether the step's states are known to be there, without asking anybody."""
        return True

    def release(self, step: int) -> None:
        """A checkpoint at `step` is on disk: what only earlier steps read may go; every rank says so."""


class SpoolFeed(Feed):
    """A spool; see the module's docstring."""

    def __init__(self, states: SpooledStates, stream: list[list[Window]], per_step: int, accelerator: Any):
        """
        Args:
            states: states that the stream's documents are read from.
            stream: micro batches of all epochs.
            per_step: micro batches of one optimiser step.
            accelerator: accelerate's Accelerator of the run.

        Raises:
            ValueError: a step needs more shards at once than the spool holds.
        """
        self._states, self._spool, self._accelerator = states, states.spool, accelerator
        self._first, self._last = _shards_of_steps(states, stream, per_step)
        self._released = 0
        self._seen = -1  # every shard up to here has been there
        for step, last in enumerate(self._last):
            needed = last - self._first[step] + 1
            if needed > self._spool.capacity:
                raise ValueError(
                    f"step {step + 1} of {per_step} packed batches (train.batches_per_step) reads {needed} shards, but "
                    f"states.spool_shards {self._spool.capacity} exist at once: raise states.sequences_per_shard "
                    "or states.spool_shards"
                )

    def wants_checkpoint(self, step: int) -> bool:
        """Used shards are held, and either the step's own are missing or the harvester has no room left."""
        if self._first[step] == self._released:
            return False
        full = self._accelerator.is_main_process and self._spool.demand() is None
        return self._any(full or not self._here(step))

    def wait(self, step: int) -> None:
        """Return when every rank sees the step's shards; rank 0 says which one is missing."""
        if self.ready(step):
            return
        main = self._accelerator.is_main_process

        def everywhere() -> bool:
            if main:
                self._spool.release(self._released)  # what is too far ahead after a step back
            return not self._any(not self._here(step))

        what = (
            f"shards {self._first[step]} to {self._last[step]} of {self._spool.total} in {self._spool.directory}, "
            f"which step {step + 1} reads; if the harvester is not running: {_HARVEST}"
        )
        wait_until(everywhere, what)
        self._seen = self._last[step]

    def ready(self, step: int) -> bool:
        """Whether an earlier wait has seen the step's shards."""
        return self._last[step] <= self._seen

    def release(self, step: int) -> None:
        """Rank 0 publishes progress and deletes; every rank closes its files first."""
        self._released = self._first[step]
        self._states.close_before(self._released)
        self._accelerator.wait_for_everyone()
        if self._accelerator.is_main_process:
            self._spool.release(self._released)

    def _here(self, step: int) -> bool:
        """Whether this rank sees every shard from the first needed one to the step's last one."""
        return {*range(self._first[step], self._last[step] + 1)} <= self._spool.present()

    def _any(self, here: bool) -> bool:
        """Whether it is so on any rank."""
        flag = torch.tensor([float(here)], device=self._accelerator.device)
        return bool(self._accelerator.reduce(flag, "sum").item() > 0)


def _shards_of_steps(states: SpooledStates, stream: list[list[Window]], per_step: int) -> tuple[list[int], list[int]]:
    """The first shard that each step or a later one reads, then `total` at the end; and the last one each step reads.

    Micro batches that no longer fill a step are not read.
    """
    total_steps = len(stream) // per_step
    read = [
        [states.shard_of(w.document) for batch in stream[s * per_step : (s + 1) * per_step] for w in batch]
        for s in range(total_steps)
    ]
    first = [states.spool.total]
    for shards in reversed(read):
        first.append(min(first[-1], *shards))
    return first[::-1], [max(shards) for shards in read]


class Prefetch:
    """Reads the next micro batch while this one is computed, and sends it to the GPU.

    At true size a micro batch is hundreds of megabytes off a memory map, a good part of a step's time. One thread reads
    one batch ahead, in the order the steps take them, so nothing but the clock changes. Processes instead of a thread
    would copy every batch once more; reading and copying release Python's lock anyway. On a GPU the copy runs on a
    stream of its own, beside the kernels of the step before. It costs host memory for one more batch, page-locked where
    there is a GPU, and device memory for one more.

    Args:
        stream: micro batches of all epochs.
        read: makes a batch from its windows, with states in page-locked memory where there is a GPU.
        device: device that batches are moved to.
    """

    def __init__(self, stream: list[list[Window]], read: Callable[[list[Window]], PackedBatch], device: torch.device):
        self._stream, self._read, self._device = stream, read, device
        self._copies = torch.Stream(device) if device.type == "cuda" else None
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
        self._ahead: dict[int, Future[tuple[PackedBatch, Any]]] = {}

    def start(self, index: int) -> None:
        """Begin to read a batch, unless it is past the end or being read."""
        if index < len(self._stream) and index not in self._ahead:
            self._ahead[index] = self._pool.submit(self._batch, self._stream[index])

    def take(self, index: int) -> PackedBatch:
        """The batch on its device, its states as stored; raises what reading it raised."""
        self.start(index)
        batch, copied = self._ahead.pop(index).result()
        if copied is not None:
            computing = torch.accelerator.current_stream(self._device)
            computing.wait_event(copied)  # the device waits, the host does not
            batch.record_stream(computing)
        return batch

    def _batch(self, windows: list[Window]) -> tuple[PackedBatch, Any]:
        """The batch, and on a GPU the event after which it is there."""
        batch = self._read(windows)
        if self._copies is None:
            return batch.on(self._device), None
        with self._copies:
            return batch.pinned().on(self._device), self._copies.record_event()
