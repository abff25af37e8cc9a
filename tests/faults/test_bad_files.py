"""Files that were cut short, changed or mixed up: found by whoever reads them, with a way on."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from safetensors.torch import load_file

from drafthead import artifacts
from drafthead.artifacts import ArtifactError
from drafthead.config import Recipe
from drafthead.config.evaluation import HEAD
from drafthead.data.packing import pack, whole
from drafthead.data.shard import shard_path, write_shard
from drafthead.evaluation.workload import BASELINE, EvalPrompt, Workload, identity
from drafthead.exporting.export import export_head
from drafthead.exporting.importing import read_public_head
from drafthead.files import write_json
from drafthead.training import checkpoint
from drafthead.training.inputs import open_inputs
from tests.damage import cut_short, flip_bit, replace_tensors
from tests.drafters.small_draft import eagle3
from tests.exporting.runs import bare_copy, list_files, recipe_at, write_run
from tests.training.synthetic import small_recipe, synthetic_sequences, synthetic_store

WORKLOAD = Workload([EvalPrompt("p", "chat", [5, 6, 7])], 0)


def read_all(recipe: Recipe) -> None:
    """As training reads."""
    store = open_inputs(recipe).train
    for i in range(len(store)):
        pack(store, [whole(i, store.tokens(i)[1], eagle3(1))], eagle3(1))


@pytest.fixture(scope="module")
def harvested(tmp_path_factory) -> Path:
    """States of both splits; the training split has two shards."""
    output = tmp_path_factory.mktemp("harvested")
    recipe = small_recipe(output)
    synthetic_store(recipe, "train", 12, seed=0)
    directory = recipe.states_dir("train")
    (directory / artifacts.MANIFEST).unlink()
    write_shard(shard_path(directory, 1), synthetic_sequences(recipe, "more", 12, seed=2), 8)
    artifacts.finish(directory, {"sequences": 24})
    synthetic_store(recipe, "validation", 4, seed=1)
    return output


@pytest.fixture
def recipe(harvested, tmp_path) -> Recipe:
    shutil.copytree(harvested, tmp_path, dirs_exist_ok=True)
    return small_recipe(tmp_path)


@pytest.mark.parametrize("name", ["offsets", "teacher_offsets", "sums"])
def test_rows_at_a_wrong_place_are_refused(recipe, name):
    path = shard_path(recipe.states_dir("train"), 1)
    wrong = load_file(path)[name].clone()
    wrong.view(-1)[3] += 1 << 40
    replace_tensors(path, {name: wrong})
    with pytest.raises(ArtifactError, match=r"shard-00001"):
        read_all(recipe)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: shard_path(d, 1).unlink(), "shard-00001.*python data_gen/harvest.py"),
        (lambda d: cut_short(shard_path(d, 1)), "shard-00001"),
        (lambda d: shutil.copy(shard_path(d, 1), shard_path(d, 2)), "shard-00002"),
        (lambda d: cut_short(d / "manifest.json"), "manifest.json"),
        (lambda d: (d / "manifest.json").write_text("[]"), "manifest.json"),
        (lambda d: (d / "manifest.json").write_text("{}"), "manifest.json .*files"),
    ],
)
def test_a_store_that_is_not_what_was_harvested_is_refused(recipe, damage, message):
    damage(recipe.states_dir("train"))
    with pytest.raises(ArtifactError, match=message):
        open_inputs(recipe)
    assert not recipe.run_dir.exists()


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "a/../../b", "a\0b"])
def test_no_manifest_names_a_file_elsewhere(tmp_path, name):
    artifacts.begin(tmp_path, "states", {})
    manifest = artifacts.finish(tmp_path, {})
    manifest["files"] = {name: {"bytes": 1, "sha256": "x"}}
    write_json(tmp_path / "manifest.json", manifest)
    for reading in (artifacts.verify_files, lambda d: artifacts.begin(d, "states", {})):
        with pytest.raises(ArtifactError, match="manifest.json .*files"):
            reading(tmp_path)


def steps_at(run_dir: Path, *steps: int) -> list[Path]:
    """Checkpoints as training writes them, with few bytes in them."""
    paths = []
    for step in steps:
        path = checkpoint.checkpoint_dir(run_dir, step)
        (path / "deepspeed").mkdir(parents=True)
        (path / "deepspeed" / "optimizer.pt").write_bytes(bytes(200))
        (path / "model.safetensors").write_bytes(bytes(200))
        state = checkpoint.TrainState(step, 1, 1, 1.0, step, 1.0, (0.5,))
        write_json(path / "state.json", dataclasses.asdict(state))
        list_files(path)
        paths.append(path)
    return paths


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: cut_short(path / "model.safetensors"),
        lambda path: flip_bit(path / "deepspeed" / "optimizer.pt"),
        lambda path: (path / "deepspeed" / "optimizer.pt").unlink(),
        lambda path: cut_short(path / "manifest.json"),
        lambda path: (path / "manifest.json").write_text("[]"),
        lambda path: (path / "manifest.json").unlink(),
    ],
)
def test_training_resumes_from_the_checkpoint_before_a_damaged_one(tmp_path, caplog, damage: Callable[[Path], object]):
    older, newer = steps_at(tmp_path, 3, 6)
    assert checkpoint.newest(tmp_path)[0] == newer
    damage(newer)
    found = checkpoint.newest(tmp_path)
    assert found[0] == older
    assert f"checkpoint {newer.name} is damaged" in caplog.text
    assert found[1].step == 3
    damage(older)
    assert checkpoint.newest(tmp_path) is None


def test_a_run_whose_record_is_another_file_is_not_exported(tmp_path):
    recipe = recipe_at(tmp_path)
    write_run(recipe)
    (recipe.run_dir / "identity.json").write_text('{"kind": "run"}')
    with pytest.raises(ArtifactError, match="identity.json .*head, .*target"):
        export_head(recipe, serve_check=False)


@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> Recipe:
    recipe = recipe_at(tmp_path_factory.mktemp("head"))
    write_run(recipe)
    export_head(recipe, serve_check=False)
    return recipe


@pytest.fixture
def head(exported, tmp_path) -> Recipe:
    shutil.copytree(exported.output_dir, tmp_path, dirs_exist_ok=True)
    return recipe_at(tmp_path)


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        ("model.safetensors", cut_short, "model.safetensors"),
        ("model.safetensors", flip_bit, "model.safetensors .*SHA-256"),
        ("config.json", Path.unlink, "config.json"),
    ],
)
def test_a_damaged_head_is_not_measured_and_can_be_exported_again(head, name, damage, message):
    identity(head, WORKLOAD, (BASELINE, HEAD))
    damage(head.head_dir / name)
    with pytest.raises(ArtifactError, match=message):
        identity(head, WORKLOAD, (BASELINE, HEAD))
    if damage is flip_bit:
        with pytest.raises(ArtifactError, match="python export/head.py"):
            export_head(head, serve_check=False)
        (head.head_dir / name).unlink()
    export_head(head, serve_check=False)
    identity(head, WORKLOAD, (BASELINE, HEAD))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 128, "target_hidden_size": 128}, "128.* 192"),
        ({"vocab_size": 999}, "vocab_size: found 999.* 3072"),
        ({"hidden_size": [1], "target_hidden_size": None}, "192"),
        ('{"a', "config.json cannot be read"),
        ("[]", "config.json"),
    ],
)
def test_somebody_elses_config_is_read_before_an_engine_starts(head, tmp_path, change, message):
    theirs = bare_copy(head.head_dir, tmp_path / "theirs")
    config = json.loads((theirs / "config.json").read_text())
    text = change if isinstance(change, str) else json.dumps(config | change)
    (theirs / "config.json").write_text(text)
    refused(tmp_path, theirs, message)


def test_somebody_elses_tensors_are_read_too(head, tmp_path):
    theirs = bare_copy(head.head_dir, tmp_path / "theirs")
    offsets = load_file(theirs / "model.safetensors")["d2t"].clone()
    offsets[0] += 10**6
    replace_tensors(theirs / "model.safetensors", {"d2t": offsets})
    refused(tmp_path, theirs, "d2t .*3072")
    cut_short(theirs / "model.safetensors")
    refused(tmp_path, theirs, "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors"):
        read_public_head(str(theirs))


def refused(output: Path, theirs: Path, message: str) -> None:
    recipe = recipe_at(output, f"eval.methods=[{{name: theirs, method: eagle3, head: {theirs}}}]")
    with pytest.raises(ValueError, match=message):
        identity(recipe, WORKLOAD, (BASELINE, "theirs"))
