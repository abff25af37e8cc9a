"""The next micro batch is read while this one is computed.

At true size a micro batch is hundreds of megabytes off a memory map, a good part of a step's time. One thread
reads one batch ahead, in the order the steps take them, so nothing but the clock changes. Processes instead of
a thread would copy every batch once more; reading and concatenating release Python's lock anyway.

Cost: host memory for one more batch, page-locked where there is a GPU.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from drafthead.data.packing import PackedBatch
from drafthead.data.windows import Window


class Prefetch:
    """Reads micro batches by their index in the stream.

    Args:
        stream: micro batches of all epochs.
        read: makes a batch of its windows.
        pin: whether batches go into page-locked memory, from which a GPU copies without waiting.
    """

    def __init__(self, stream: list[list[Window]], read: Callable[[list[Window]], PackedBatch], pin: bool):
        self._stream, self._read, self._pin = stream, read, pin
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="read-ahead")
        self._ahead: dict[int, Future[PackedBatch]] = {}

    def start(self, index: int) -> None:
        """Begin to read a batch, unless it is past the end or being read."""
        if index < len(self._stream) and index not in self._ahead:
            self._ahead[index] = self._pool.submit(self._batch, self._stream[index])

    def take(self, index: int) -> PackedBatch:
        """The batch; raises what reading it raised."""
        self.start(index)
        return self._ahead.pop(index).result()

    def _batch(self, windows: list[Window]) -> PackedBatch:
        batch = self._read(windows)
        return batch.pinned() if self._pin else batch
