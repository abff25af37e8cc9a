"""Online training, two ranks and two harvesters: nobody reads what is not there or deletes what another reads."""

import threading
import time
from itertools import chain

import pytest

from drafthead import artifacts, locks
from drafthead.data import spool as spools
from drafthead.data.shard import StateSequence, write_shard
from drafthead.data.spool import Spool
from drafthead.drafters.trained import read_checkpoint
from drafthead.exporting.card import write_card
from drafthead.exporting.export import export_head
from tests.training.launching import checkpoints, entries, launch, run
from tests.training.synthetic import claim_spool, small_recipe, synthetic_sequences, synthetic_store

pytestmark = pytest.mark.slow

ONLINE = (
    "train.batches_per_step=2", "states.spool_shards=4", "states.sequences_per_shard=6", "train.checkpoint_every=1000",
)  # fmt: skip


def feed(spool: Spool, sequences: list[StateSequence], size: int, most: list[int], wrote: list[int]) -> None:
    """A harvester whose states exist already; it notes what it wrote and how many shards lay there at most."""
    while (index := spool.claim()) != spool.total:
        if index is not None:
            start = index % spool.num_shards * size
            write_shard(spool.path(index), sequences[start : start + size], num_target_layers=8)
            wrote.append(index)
            most.append(len(spool.present()))
            spool.release_claim(index)
        time.sleep(0.1)


def test_two_ranks_use_up_a_spool(tmp_path):
    recipe = small_recipe(tmp_path, *ONLINE)
    synthetic_store(recipe, "validation", 6, seed=1)
    sequences = synthetic_sequences(recipe, "train", 60, seed=0)
    spool = claim_spool(recipe, sequences)
    locks.acquire(spool.directory, spools.PROGRESS_LOCK)
    refused = launch(recipe, *ONLINE, ranks=2)
    assert refused.returncode == 1
    assert f"is writing into {spool.directory}" in refused.stderr
    locks.release(spool.directory, spools.PROGRESS_LOCK)
    most: list[int] = []
    by_harvester: list[list[int]] = [[], []]
    harvesters = [
        threading.Thread(target=feed, args=(spool, sequences, 6, most, wrote), daemon=True) for wrote in by_harvester
    ]
    for harvester in harvesters:
        harvester.start()
    run(recipe, *ONLINE, ranks=2)
    for harvester in harvesters:
        harvester.join(timeout=10)
        assert not harvester.is_alive()
    assert max(most) == 4
    assert all(by_harvester)
    assert sorted(chain(*by_harvester)) == list(range(spool.total)), "each shard once"
    assert (spool.present(), spool.first_needed()) == (set(), 10)
    steps = entries(recipe.run_dir)
    total = artifacts.require(recipe.run_dir, "run", "train")["counts"]["total_steps"]
    assert [e["step"] for e in steps] == list(range(1, total + 1))
    assert steps[-1]["loss"] < 0.7 * steps[0]["loss"]

    # Nothing was measured on the weights that were kept between validations, of which there is one here, at the end.
    *between, last = checkpoints(recipe.run_dir)
    assert (
        read_checkpoint(last).state["acceptance_length"]
        == entries(recipe.run_dir, "validation")[-1]["acceptance_length"]
    )
    head = export_head(recipe, between[-1], serve_check=False)
    assert artifacts.read_manifest(head)["identity"]["predicted_acceptance_length"] is None
    assert between[-1].name not in write_card(recipe).read_text()
