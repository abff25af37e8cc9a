"""The spool: bounded at every moment, no shard lost or written for nothing, and killed sides agree again."""

import multiprocessing
import time
from multiprocessing.connection import Connection

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthead.artifacts import ArtifactError
from drafthead.data.packing import Window, plan_epoch, plan_stream, whole
from drafthead.data.responses import ResponseTokens, part_path, write_part
from drafthead.data.shard import write_shard
from drafthead.data.spool import Spool, SpooledStates
from tests.artifacts import response
from tests.data.sequences import sequence
from tests.data.spools import planned
from tests.drafters.small_draft import eagle3


def write(spool: Spool, *indices: int) -> None:
    for index in indices:
        spool.path(index).touch()


def harvester(spool: Spool, end: Connection) -> None:
    """Another process that claims a shard, tells which, and never writes it."""
    end.send(spool.claim())
    time.sleep(600)


def test_harvesters_share_a_spool_and_a_killed_ones_claim_goes(tmp_path):
    """This process and two others, of which one is killed; four shards have room."""
    spool = Spool(tmp_path, capacity=4, num_shards=3, epochs=2)
    harvesters, fork = [], multiprocessing.get_context("fork")
    receiver, sender = fork.Pipe(duplex=False)
    try:
        for index in (0, 1):
            harvesters.append(fork.Process(target=harvester, args=(spool, sender), daemon=True))
            harvesters[-1].start()
            assert receiver.recv() == index
        assert spool.claim() == 2
        write(spool, 2)
        assert spool.claim({2}) == 3, "what has arrived and is still claimed counts once"
        assert spool.claim({2, 3}) is None  # no room
        harvesters[0].kill()
        harvesters[0].join()
        assert spool.claim({2, 3}) == 0
        write(spool, 0, 2, 3)
        for index in (0, 2, 3):
            spool.release_claim(index)
        assert spool.claim() is None  # the other one's is on its way
        spool.release(2)
        write(spool, 4, 5)
        assert spool.claim() == 6, "the other's is used up by now"
    finally:
        for other in harvesters:
            other.kill()
            other.join()


@settings(max_examples=60)
@given(
    capacity=st.integers(2, 6),
    num_shards=st.integers(1, 7),
    epochs=st.integers(1, 3),
    moves=st.lists(st.sampled_from(["write", "land", "kill harvester", "train", "release", "fall back"]), max_size=120),
)
def test_any_interleaving_stays_bounded_and_ends(tmp_path_factory, capacity, num_shards, epochs, moves):
    """Harvester: take an index, let it land. Trainer: use the next shard, or checkpoint and release what is used."""
    spool = Spool(tmp_path_factory.mktemp("spool"), capacity, num_shards, epochs)
    in_flight: int | None = None  # handed to the disk and not there yet
    trained = released = 0

    def move(name: str) -> None:
        nonlocal in_flight, trained, released
        if name == "write" and in_flight is None:
            index = spool.demand()
            in_flight = None if index == spool.total else index
            assert in_flight is None or in_flight >= released, "a shard that was used up is not harvested again"
        elif name == "land" and in_flight is not None:
            write(spool, in_flight)
            in_flight = None
        elif name == "kill harvester":
            in_flight = None
        elif name == "train" and trained in spool.present():
            trained += 1
        elif name == "release":
            released = trained
            spool.release(released)
        elif name == "fall back" and released:
            trained = released = released - 1
            spool.release(released)
        assert len(spool.present() | ({in_flight} - {None})) <= capacity

    for name in moves:
        move(name)
    for _ in range(4 * (spool.total + capacity)):  # left alone, both come to an end
        for name in ("write", "land", "train", "release") if released < spool.total else ():
            move(name)
    assert released == spool.total
    assert not spool.present()
    assert spool.demand() == spool.total


@pytest.fixture
def spooled(tmp_path) -> SpooledStates:
    """Five documents in shards of two, three shards an epoch, two epochs, groups of one shard."""
    write_part(part_path(tmp_path, 0), [response(name, 2, 3 + i) for i, name in enumerate("abcde")])
    return SpooledStates(
        Spool(tmp_path, 2, 3, 2), ResponseTokens(tmp_path), sequences_per_shard=2, aux_layer_ids=[1, 3]
    )


def test_a_document_lies_in_a_shard_of_its_epoch(spooled):
    assert [spooled.shard_of(i) for i in range(10)] == [0, 0, 1, 1, 2, 3, 3, 4, 4, 5]
    assert (len(spooled), spooled.epoch_stride) == (5, 5)
    states = {name: sequence(name, 5 + i) for i, name in enumerate("abcde")}
    write_shard(spooled.spool.path(4), [states["c"], states["d"]], num_target_layers=5)
    document = spooled[spooled.epoch_stride + 3]
    assert document.id == "d"
    tokens, mask = spooled.tokens(8)
    assert torch.equal(tokens, document.input_ids.long())
    assert torch.equal(mask, document.loss_mask.bool())
    spooled.close_before(5)
    spooled.spool.release(5)
    with pytest.raises(FileNotFoundError):
        spooled[8]


def test_a_shard_of_other_sequences_is_refused(spooled):
    write_shard(spooled.spool.path(0), [sequence("c", 5), sequence("d", 5)], num_target_layers=5)
    with pytest.raises(ArtifactError, match="shard-00000"):
        spooled[0]


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=40),
    capacity=st.integers(2, 9),
    size=st.integers(1, 5),
    epochs=st.integers(1, 3),
)
def test_every_window_once_per_epoch_and_only_with_its_group(lengths, capacity, size, epochs):
    states = planned(len(lengths), capacity, size, epochs)
    windows = [Window(i, 0, n, 0, n, (n,)) for i, n in enumerate(lengths) if n > 3]  # some documents have none
    stream = plan_stream(states, windows, 40, 0, epochs)
    documents = [w.document for batch in stream for w in batch]
    assert sorted(documents) == [e * len(lengths) + w.document for e in range(epochs) for w in windows]
    assert all(sum(w.num_tokens for w in batch) <= 40 for batch in stream)
    group = max(1, capacity // 2)
    groups = [
        {(s // states.spool.num_shards, s % states.spool.num_shards // group) for s in map(states.shard_of, docs)}
        for docs in ([w.document for w in batch] for batch in stream)
    ]
    assert all(len(batch_groups) == 1 for batch_groups in groups), "a micro batch reads one group"
    order = [batch_groups.pop() for batch_groups in groups]
    assert order == sorted(order), "groups follow each other"


def test_one_group_of_everything_is_the_order_of_a_whole_store():
    windows = [whole(i, torch.ones(3 + i % 7), eagle3(2)) for i in range(50)]
    states = planned(50, capacity=10, size=10, epochs=2)
    stream = plan_stream(states, windows, 24, 5, 2)
    expected = [[w.document + e * 50 for w in batch] for e in range(2) for batch in plan_epoch(windows, 24, 5, e)]
    assert [[w.document for w in batch] for batch in stream] == expected
