"""Spools to be planned on, without a response or a shard on disk."""

from types import SimpleNamespace

from drafthead.data.spool import Spool, SpooledStates


def planned(count: int, capacity: int, size: int, epochs: int) -> SpooledStates:
    ids = SimpleNamespace(ids=[str(i) for i in range(count)])  # the plan reads their number only
    return SpooledStates(Spool(None, capacity, -(-count // size), epochs), ids, size, [1])
