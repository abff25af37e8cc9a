"""Export as a whole: what it checks, what it refuses, and what it leaves behind when it fails or is killed."""

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from drafthead import artifacts
from drafthead.artifacts import ArtifactError, begin, finish, read_json
from drafthead.exporting.export import export_head, open_checkpoint
from drafthead.target.spec import load_target_spec
from tests.exporting.runs import config_of, recipe_at, write_run
from tests.recipes import tiny_recipe


@pytest.fixture
def recipe(tmp_path):
    recipe = recipe_at(tmp_path, "target.dtype=bfloat16")
    write_run(recipe)
    return recipe


def test_export_is_whole_checked_and_done_once(recipe, tmp_path, caplog):
    caplog.set_level(logging.INFO)
    directory = export_head(recipe, serve_check=False)
    manifest = artifacts.require(directory, "head", "")
    assert set(manifest["files"]) == {"config.json", "model.safetensors"}
    assert manifest["counts"]["serve_check"] is None
    written = load_file(directory / "model.safetensors")
    masters = open_checkpoint(recipe, None, load_target_spec(recipe.target_path)).weights()
    parameters = [tensor for tensor in masters.values() if tensor.is_floating_point()]
    assert manifest["counts"]["parameters"] == sum(tensor.numel() for tensor in parameters)
    for name, tensor in written.items():
        expected = masters[name].bfloat16() if masters[name].is_floating_point() else masters[name]
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)  # rounded once, from float32
    nested = config_of(recipe_at(tmp_path, "export.format=speculators"))["transformer_layer_config"]
    for config in (read_json(directory / "config.json"), nested):
        for key in ("rope_parameters", "max_position_embeddings"):
            assert config[key] == read_json(Path(recipe.target_path) / "config.json")[key]
    assert f"{recipe.run_dir} does not say which prompts" in caplog.text
    assert export_head(recipe, serve_check=False) == directory
    assert str(directory) in caplog.messages[-1]


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("head.norm_before_residual=true", "head.norm_before_residual: found True, wanted False"),
        ("target.aux_layer_ids=[1,4,6]", r"target.aux_layer_ids: found \[1, 4, 6\], wanted \[2, 4, 6\]"),
        ("engine.max_model_len=4096", "max_position_embeddings: found 2048, wanted 4096"),
    ],
)
def test_a_recipe_that_would_serve_another_head_is_refused(recipe, tmp_path, override, message):
    changed = recipe_at(tmp_path, override)
    with pytest.raises(ValueError, match=message):
        export_head(changed, serve_check=False)
    assert not changed.head_dir.exists()
    export_head(recipe, serve_check=False)  # the failed attempt claims nothing


def test_a_checkpoint_of_another_run_or_of_none_is_refused(recipe, tmp_path):
    checkpoint = write_run(recipe_at(tmp_path, "name=other"))
    copy = shutil.copytree(checkpoint, tmp_path / "elsewhere/a/step_00000007")
    for path, message in ((checkpoint, "name=other"), (copy, "runs/NAME/checkpoints")):
        with pytest.raises(ValueError, match=message):
            export_head(recipe, path, serve_check=False)
    assert not recipe.head_dir.exists()


def test_missing_run_and_missing_checkpoint_say_what_to_do(tmp_path):
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(ArtifactError, match=r"accelerate launch train/eagle3.py"):
        export_head(recipe)
    begin(recipe.run_dir, "run", {})
    finish(recipe.run_dir, {"best_step": 5})
    with pytest.raises(ArtifactError, match=r"step_00000005 .* none"):
        export_head(recipe)
