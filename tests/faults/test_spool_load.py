"""A spool of two harvesters, one of which is killed: every shard comes when it is needed, whole, and in bounds."""

import random
import time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest

from drafthead.data.spool import Spool
from drafthead.files import atomic_path
from drafthead.generation.harvest import fill
from drafthead.generation.shards import ShardJob
from drafthead.processes import ends_with_parent
from tests.faults.payload import leftovers

SHARDS, EPOCHS, CAPACITY = 3, 8, 4


def harvest(directory: Path, end_with_us) -> None:
    """Shards that take a moment each and say what they are of."""
    if end_with_us:
        end_with_us()

    def make(job: ShardJob, bar) -> None:
        with atomic_path(job.path) as temporary:
            time.sleep(0.03)
            temporary.write_text(str(job.responses))

    jobs = [ShardJob(directory, [index]) for index in range(SHARDS)]
    fill(SimpleNamespace(make=make, finish=lambda: None), Spool(directory, CAPACITY, SHARDS, EPOCHS), jobs)


@pytest.mark.slow
def test_a_harvester_that_is_killed_leaves_no_trace_in_a_spool(tmp_path, fault_seed):
    chooser, context, spool = random.Random(fault_seed), get_context("spawn"), Spool(tmp_path, CAPACITY, SHARDS, EPOCHS)

    def started():
        process = context.Process(target=harvest, args=(tmp_path, ends_with_parent()))
        process.start()
        return process

    harvesters = [started() for _ in range(2)]
    for index in range(spool.total):
        while not spool.path(index).exists():
            assert any(process.is_alive() for process in harvesters)
            time.sleep(0.001)
        assert spool.path(index).read_text() == str([index % SHARDS])
        assert len(spool.present()) <= spool.capacity
        if index == 5:
            time.sleep(chooser.uniform(0, 0.1))  # they go on until the spool is full
            killed = harvesters.pop(chooser.randrange(2))
            killed.kill()
            killed.join()
            harvesters.append(started())
        spool.release(index + 1)
    for process in harvesters:
        process.join()
        assert process.exitcode == 0
    assert not leftovers(tmp_path)
