"""The state stores of both backends, in bf16 and fp8: right rows, the same bytes after a resume, no foreign states."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafthead.config import Recipe
from drafthead.data.responses import read_responses
from drafthead.data.shard import dequantise
from drafthead.data.store import Shard, StateStore, shard_path, verify_store, write_shard
from drafthead.drafters.fp8 import quantise
from drafthead.generation.states import harvest as stage
from drafthead.generation.states.inspect_states import print_verification
from drafthead.generation.states.shard_jobs import list_jobs
from drafthead.generation.states.state_stores import argmax_agreement
from drafthead.planning import Assumed
from drafthead.planning.lengths import all_lengths
from drafthead.planning.stages import states_bytes
from drafthead.provenance import ArtefactError, read_json
from drafthead.target.pieces import TargetHead, load_target_spec
from tests.damage import edit_config, flip_bit, half_written
from tests.generation.small import copy_of, never, small_recipe
from tests.recipes import changed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def stores(regenerated: Recipe, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Recipe]:
    """Finished stores of the same responses, by backend and format."""
    made = {}
    for backend in ("vllm", "transformers"):
        for number_format in ("bf16", "fp8"):
            directory = tmp_path_factory.mktemp("formats") / f"{backend}-{number_format}"
            recipe = copy_of(regenerated, directory, backend=backend, format=number_format)
            stage.harvest(recipe)
            made[backend, number_format] = recipe
    return made


@pytest.fixture(scope="module")
def harvested(stores: dict[tuple[str, str], Recipe]) -> Recipe:
    return stores["vllm", "bf16"]


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
    # three aux layers in bf16, ids and mask; the last boundary, argmax and lse only where loss can lie
    states = StateStore(harvested.states_dir("validation"))
    tail = sum(states[i].num_tokens - states[i].first_teacher_row for i in range(4)) / counts["tokens"]
    assert 0.1 < tail < 0.9
    assert counts["bytes_per_token"] == pytest.approx(3 * 192 * 2 + 5 + tail * (192 * 2 + 8), rel=0.05)


def test_a_lost_shard_comes_back_byte_for_byte(harvested: Recipe, tmp_path: Path):
    recipe = copy_of(harvested, tmp_path / "resumed")
    directory = recipe.states_dir("train")
    lost = directory / "shard-00001.safetensors"
    before, kept = lost.read_bytes(), (directory / "shard-00000.safetensors").stat().st_mtime_ns
    lost.unlink()
    (directory / "manifest.json").unlink()
    half_written(directory / "shard-00001.safetensors")
    stage.harvest(recipe)
    assert lost.read_bytes() == before
    assert (directory / "shard-00000.safetensors").stat().st_mtime_ns == kept
    assert not list(directory.glob(".*.tmp"))
    stage.harvest(recipe, run=never)  # complete: nothing to do


def test_other_taps_and_another_targets_text_are_refused(harvested: Recipe, tmp_path: Path):
    with pytest.raises(ArtefactError, match=r"aux_layer_ids: found \[2, 4, 6\], wanted \[1, 2, 3\]"):
        stage.harvest(changed(harvested, "target", aux_layer_ids=(1, 2, 3)))

    other = Path(shutil.copytree(harvested.target_path, tmp_path / "other"))
    edit_config(other, rms_norm_eps=1e-6)
    with pytest.raises(ArtefactError, match="the text would not be the target's own"):
        stage.harvest(changed(harvested, "target", path=str(other)))


def test_texts_longer_than_the_engine_and_foreign_shards_are_refused(harvested: Recipe, tmp_path: Path):
    with pytest.raises(ValueError, match=r"max_model_len 64 allows 63; set it to"):
        list_jobs(changed(harvested, "engine", max_model_len=64), "train")

    recipe = copy_of(harvested, tmp_path / "foreign")
    directory = recipe.states_dir("train")
    shutil.copy(directory / "shard-00001.safetensors", directory / "shard-00000.safetensors")
    (directory / "manifest.json").unlink()
    with pytest.raises(ArtefactError, match="holds other sequences"):
        stage.harvest(recipe)
    (directory / "shard-00000.safetensors").write_bytes(b"short")
    with pytest.raises(ArtefactError, match="is not a whole shard"):
        stage.harvest(recipe)


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


@pytest.mark.parametrize("backend", ["vllm", "transformers"])
@pytest.mark.parametrize("split", stage.SPLITS)
def test_fp8_rounds_the_taps_and_nothing_else(stores, backend, split):
    exact, rounded = (StateStore(stores[backend, f].states_dir(split)) for f in ("bf16", "fp8"))
    assert Shard(shard_path(stores[backend, "fp8"].states_dir(split), 0)).number_format == "fp8"
    for i in range(len(exact)):
        for name in ("input_ids", "loss_mask", "last_hidden", "argmax", "lse"):
            assert torch.equal(getattr(exact[i], name), getattr(rounded[i], name)), name
        for layer_id, rows in exact[i].aux.items():
            assert torch.equal(rounded[i].aux[layer_id], dequantise(*quantise(rows)))


@pytest.mark.parametrize("backend", ["vllm", "transformers"])
def test_the_teacher_of_an_fp8_store_names_the_targets_argmax(stores, backend):
    recipe = stores[backend, "fp8"]
    head, agreed, total = TargetHead.load(recipe.target_path, dtype="bfloat16"), 0, 0
    for split in stage.SPLITS:
        states = StateStore(recipe.states_dir(split))
        for i in range(len(states)):
            argmax, _ = head.stats(states[i].last_hidden)
            agreed, total = agreed + int((argmax == states[i].argmax).sum()), total + len(argmax)
    assert total > 100
    assert agreed / total >= 0.995


def test_fp8_costs_little_more_than_half(stores):
    sizes = [read_json(stores["vllm", f].states_dir("train") / "manifest.json")["counts"] for f in ("bf16", "fp8")]
    assert sizes[1]["bytes_per_token"] < 0.65 * sizes[0]["bytes_per_token"]  # the teacher's rows stay in bf16


def test_the_other_format_is_refused(stores, tmp_path: Path):
    recipe = stores["vllm", "fp8"]
    with pytest.raises(ArtefactError, match=r"format: found 'fp8', wanted 'bf16'"):
        stage.harvest(changed(recipe, "states", format="bf16"))


def test_a_store_of_the_first_layout_is_refused(stores, tmp_path: Path):
    recipe = copy_of(stores["vllm", "fp8"], tmp_path / "old")
    identity = recipe.states_dir("train") / "identity.json"
    identity.write_text(identity.read_text().replace('"layout": 4', '"layout": 1'))
    with pytest.raises(ArtefactError, match=r"layout: found 1, wanted 4"):
        stage.harvest(recipe)
    shutil.rmtree(tmp_path / "old")


@pytest.mark.parametrize("split", stage.SPLITS)
def test_both_backends_agree(stores, split):
    """bf16 rounding in another order: states within 5 %."""
    ours, theirs = (StateStore(stores[b, "bf16"].states_dir(split)) for b in ("vllm", "transformers"))
    for i in range(len(ours)):
        assert ours[i].first_teacher_row == theirs[i].first_teacher_row > 0
        pairs = [
            (ours[i].last_hidden, theirs[i].last_hidden),
            *((ours[i].aux[t], theirs[i].aux[t]) for t in ours.aux_layer_ids),
        ]
        for found, wanted in pairs:
            assert (found.float() - wanted.float()).norm() < 0.05 * wanted.float().norm()


def test_both_backends_agree_on_what_follows_greedy_text(stores):
    """Log-sum-exps within the rounding of the states, and nearly every argmax."""
    ours, theirs = (StateStore(stores[b, "bf16"].states_dir("validation")) for b in ("vllm", "transformers"))
    agreed = total = 0
    for i in range(len(ours)):
        torch.testing.assert_close(ours[i].lse, theirs[i].lse, rtol=0.05, atol=0.2)
        agreed += int((ours[i].argmax == theirs[i].argmax).sum())
        total += len(ours[i].argmax)
    assert agreed / total > 0.95


def test_the_transformers_backends_last_boundary_gives_the_targets_logits(regenerated: Recipe):
    from transformers import AutoModelForCausalLM

    from drafthead.generation.states.harvest_transformers import capture

    path = regenerated.target_path
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    text = torch.randint(12, 3000, (70,), generator=torch.Generator().manual_seed(0)).tolist()
    last = capture(model, text, (8,))[:, 0]
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0]
    torch.testing.assert_close(TargetHead.load(path, dtype="float32").logits(last), logits, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("number_format", ["bf16", "fp8"])
def test_the_dry_run_foretells_the_bytes_and_verification_finds_them_whole(stores, number_format, capsys):
    recipe = stores["vllm", number_format]
    spec = load_target_spec(recipe.target_path)
    for one in all_lengths(recipe, Assumed()):
        paths = recipe.states_dir(one.split).glob("shard-*")
        assert sum(path.stat().st_size for path in paths) == pytest.approx(states_bytes(recipe, spec, one), rel=0.01)
        assert verify_store(recipe.states_dir(one.split)) == []
    assert print_verification(recipe)


def test_verification_names_a_changed_shard(stores, tmp_path: Path, capsys):
    recipe = copy_of(stores["transformers", "fp8"], tmp_path / "changed")
    path = shard_path(recipe.states_dir("train"), 1)
    flip_bit(path)
    assert not print_verification(recipe)
    said = capsys.readouterr().out
    assert "shard-00001.safetensors has another SHA-256" in said
    assert "validation 1 shards, checksums, structure and values: whole" in said


def test_responses_are_required(tmp_path: Path):
    with pytest.raises(ArtefactError, match=r"does not exist; run: python data_gen/regenerate\.py"):
        stage.harvest(small_recipe(tmp_path))
