"""The state stores: right rows, the same bytes after a resume, and no states of another target's text."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafthead.config import Recipe
from drafthead.data.responses import read_responses
from drafthead.data.store import Shard, StateStore, write_shard
from drafthead.generation.states import harvest as stage
from drafthead.generation.states.shard_jobs import list_jobs
from drafthead.generation.states.state_stores import argmax_agreement
from drafthead.provenance import ArtefactError, read_json
from tests.generation.small import copy_of, never, small_recipe


@pytest.fixture(scope="module")
def harvested(regenerated: Recipe, tmp_path_factory: pytest.TempPathFactory) -> Recipe:
    recipe = copy_of(regenerated, tmp_path_factory.mktemp("harvested") / "vllm")
    stage.harvest(recipe)
    return recipe


@pytest.mark.slow
def test_stores_hold_the_responses_with_their_masks_and_say_how_many(harvested: Recipe):
    for split in stage.SPLITS:
        responses, states = read_responses(harvested.responses_dir(split)), StateStore(harvested.states_dir(split))
        assert len(states) == len(responses)
        for i, response in enumerate(responses):
            sequence = states[i]
            assert sequence.id == response.id
            whole = [*response.prompt_ids, *response.response_ids, *response.continuation_ids]
            assert sequence.input_ids.tolist() == whole
            expected = [0] * len(response.prompt_ids) + [1] * len(response.response_ids)
            assert sequence.loss_mask.tolist() == expected + [0] * len(response.continuation_ids)
            assert sequence.aux[2].dtype == torch.bfloat16
    counts = read_json(harvested.states_dir("validation") / "manifest.json")["counts"]
    assert counts["sequences"] == 4
    assert counts["argmax_agreement"] > 0.95
    # three taps in bf16, ids and mask; the last boundary, argmax and lse only where loss can lie
    states = StateStore(harvested.states_dir("validation"))
    tail = sum(states[i].num_tokens - states[i].first_row for i in range(4)) / counts["tokens"]
    assert 0.1 < tail < 0.9
    assert counts["bytes_per_token"] == pytest.approx(3 * 192 * 2 + 5 + tail * (192 * 2 + 8), rel=0.05)


@pytest.mark.slow
def test_both_backends_agree(harvested: Recipe, tmp_path: Path):
    recipe = copy_of(harvested, tmp_path / "hf", backend="transformers")
    for split in stage.SPLITS:
        shutil.rmtree(recipe.states_dir(split))
    stage.harvest(recipe)
    for split in stage.SPLITS:
        ours, theirs = StateStore(harvested.states_dir(split)), StateStore(recipe.states_dir(split))
        for i in range(len(ours)):
            for tap in ours.tap_ids:
                difference = (ours[i].aux[tap].float() - theirs[i].aux[tap].float()).norm()
                assert difference < 0.05 * theirs[i].aux[tap].float().norm()  # bf16 rounding, in another order


@pytest.mark.slow
def test_a_lost_shard_comes_back_byte_for_byte(harvested: Recipe, tmp_path: Path):
    recipe = copy_of(harvested, tmp_path / "resumed")
    directory = recipe.states_dir("train")
    lost = directory / "shard-00001.safetensors"
    before, kept = lost.read_bytes(), (directory / "shard-00000.safetensors").stat().st_mtime_ns
    lost.unlink()
    (directory / "manifest.json").unlink()
    (directory / ".shard-00001.safetensors.1.tmp").write_bytes(b"half")
    stage.harvest(recipe)
    assert lost.read_bytes() == before
    assert (directory / "shard-00000.safetensors").stat().st_mtime_ns == kept
    assert not list(directory.glob(".*.tmp"))
    stage.harvest(recipe, run=never)  # complete: nothing to do


@pytest.mark.slow
def test_other_taps_and_another_targets_text_are_refused(harvested: Recipe, tmp_path: Path):
    taps = harvested.target.model_copy(update={"tap_ids": (1, 2, 3)})
    with pytest.raises(ArtefactError, match=r"tap_ids: found \[2, 4, 6\], wanted \[1, 2, 3\]"):
        stage.harvest(harvested.model_copy(update={"target": taps}))

    other = Path(shutil.copytree(harvested.target_path, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-6}))
    target = harvested.target.model_copy(update={"path": str(other)})
    with pytest.raises(ArtefactError, match="the text would not be the target's own"):
        stage.harvest(harvested.model_copy(update={"target": target}))


@pytest.mark.slow
def test_texts_longer_than_the_engine_and_foreign_shards_are_refused(harvested: Recipe, tmp_path: Path):
    engine = harvested.engine.model_copy(update={"max_model_len": 64})
    with pytest.raises(ValueError, match=r"max_model_len 64 allows 63; set it to"):
        list_jobs(harvested.model_copy(update={"engine": engine}), "train")

    recipe = copy_of(harvested, tmp_path / "foreign")
    directory = recipe.states_dir("train")
    shutil.copy(directory / "shard-00001.safetensors", directory / "shard-00000.safetensors")
    (directory / "manifest.json").unlink()
    with pytest.raises(ArtefactError, match="holds other sequences"):
        stage.harvest(recipe)
    (directory / "shard-00000.safetensors").write_bytes(b"short")
    with pytest.raises(ArtefactError, match="is not a whole shard"):
        stage.harvest(recipe)


@pytest.mark.slow
def test_states_that_do_not_lead_to_the_text_are_refused(harvested: Recipe, tmp_path: Path):
    recipe = copy_of(harvested, tmp_path / "wrong")
    (job,) = list_jobs(recipe, "validation")
    shard = Shard(job.path)
    shifted = [replace(shard[i], argmax=shard[i].argmax.roll(1)) for i in range(len(shard))]
    write_shard(job.path, shifted, num_target_layers=8)
    (recipe.states_dir("validation") / "manifest.json").unlink()
    with pytest.raises(ArtefactError, match="do not lead to the target's own text"):
        stage.harvest(recipe)
    assert argmax_agreement(list_jobs(harvested, "train")) is None  # sampled text proves nothing


def test_responses_are_required(tmp_path: Path):
    with pytest.raises(ArtefactError, match=r"does not exist; run: python data_gen/regenerate\.py"):
        stage.harvest(small_recipe(tmp_path))
