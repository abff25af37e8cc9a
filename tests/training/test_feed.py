"""What the loop is told when states come and go, and directories of the other kind."""

import pytest

from drafthead import artifacts
from drafthead.data import spool as spools
from drafthead.data import store
from drafthead.data.packing import Window, plan_stream
from drafthead.training.feed import SpoolFeed, _shards_of_steps
from drafthead.training.inputs import open_inputs
from tests.artifacts import response, write_response_artifact
from tests.data.spools import planned
from tests.training.synthetic import claim_spool, small_recipe, synthetic_sequences, synthetic_store, synthetic_stores


def batches(*documents: tuple[int, ...]) -> list[list[Window]]:
    return [[Window(d, 0, 4, 0, 4, (4,)) for d in batch] for batch in documents]


def test_the_example_of_the_docstring():
    states = planned(6, capacity=4, size=1, epochs=1)
    first, last = _shards_of_steps(states, batches((0, 1), (1, 0), (0, 1), (2, 3), (3, 2), (2, 3), (4, 5)), 1)
    assert first == [0, 0, 0, 2, 2, 2, 4, 6]
    assert last == [1, 1, 1, 3, 3, 3, 5]


def test_a_step_of_several_micro_batches_needs_the_shards_of_all():
    states = planned(4, capacity=4, size=1, epochs=1)
    first, last = _shards_of_steps(states, batches((0,), (1,), (2,), (3,), (3,)), 2)
    assert (first, last) == ([0, 2, 4], [1, 3])  # the fifth fills no step


def test_a_step_that_needs_more_than_the_spool_holds_is_refused():
    states = planned(9, capacity=3, size=1, epochs=1)
    windows = [Window(i, 0, 40, 0, 40, (40,)) for i in range(9)]
    stream = plan_stream(states, windows, 40, 0, 1)
    SpoolFeed(states, stream, 3, accelerator=None)
    with pytest.raises(ValueError, match=r"step 1 of 4 packed batches .* reads 4 shards, but states.spool_shards 3"):
        SpoolFeed(states, stream, 4, accelerator=None)


def test_a_whole_store_is_no_spool_and_a_spool_no_whole_store(tmp_path):
    whole, online = small_recipe(tmp_path), small_recipe(tmp_path, "states.spool_shards=4")
    write_response_artifact(whole.responses_dir("train"), [response("a", 2, 3)])
    artifacts.begin(whole.states_dir("train"), store.KIND, {})
    with pytest.raises(artifacts.ArtifactError, match="kind: found 'states', wanted 'spool'"):
        open_inputs(online)
    (whole.states_dir("train") / artifacts.IDENTITY).unlink()
    artifacts.begin(whole.states_dir("train"), spools.KIND, spools.terms(online))
    with pytest.raises(artifacts.ArtifactError, match="half finished"):
        open_inputs(whole)
    artifacts.finish(whole.states_dir("train"), {})
    with pytest.raises(artifacts.ArtifactError, match=r"spool .*states"):
        open_inputs(whole)


def test_a_spool_of_other_terms_is_refused_by_value(tmp_path):
    recipe = small_recipe(tmp_path, "states.spool_shards=4")
    synthetic_store(recipe, "validation", 2, seed=1)
    claim_spool(recipe, synthetic_sequences(recipe, "train", 1, seed=0))
    assert len(open_inputs(recipe).train) == 1
    with pytest.raises(artifacts.ArtifactError, match=r"spool_shards: found 4, wanted 6"):
        open_inputs(small_recipe(tmp_path, "states.spool_shards=6"))


def test_a_store_of_another_format_is_refused_by_value(tmp_path):
    synthetic_stores(small_recipe(tmp_path), 2, 2)
    with pytest.raises(artifacts.ArtifactError, match=r"format: found 'bf16', wanted 'fp8'"):
        open_inputs(small_recipe(tmp_path, "states.format=fp8"))
