"""Spools to be planned on, without a text or a shard on disk."""

from drafthead.data.spool import Spool
from drafthead.data.spooled import SpooledStates


class _Names:
    """As many texts as asked for; the plan reads no more of them than their number."""

    def __init__(self, count: int):
        self.ids = [str(i) for i in range(count)]

    def __len__(self) -> int:
        return len(self.ids)


def planned(count: int, capacity: int, size: int, epochs: int) -> SpooledStates:
    return SpooledStates(Spool(None, capacity, -(-count // size), epochs), _Names(count), size, [1])
