"""Export as a whole: what it proves, what it refuses, and what it leaves behind when it fails or is killed."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafthead import provenance
from drafthead.drafters.base import draft_shape
from drafthead.exporting import head as exporting
from drafthead.exporting.checkpoint import open_checkpoint
from drafthead.exporting.head import export_head
from drafthead.exporting.reload import check_reload
from drafthead.exporting.served import served_values
from drafthead.target.pieces import load_target_spec
from tests.exporting.runs import recipe_at, write_run


@pytest.fixture
def recipe(tmp_path):
    recipe = recipe_at(tmp_path)
    write_run(recipe)
    return recipe


def test_rotation_and_positions_are_the_targets_unless_the_recipe_says_otherwise(recipe, tmp_path):
    config = json.loads((export_head(recipe, serve_check=False) / "config.json").read_text())
    target = json.loads((Path(recipe.target_path) / "config.json").read_text())
    assert config["rope_parameters"] == target["rope_parameters"]
    assert config["rope_parameters"]["rope_type"] == "yarn"
    assert config["max_position_embeddings"] == target["max_position_embeddings"]
    shorter = recipe_at(tmp_path, "export.max_position_embeddings=1500", "export.format=speculators")
    config = json.loads((export_head(shorter, serve_check=False) / "config.json").read_text())
    assert served_values(config)["max_position_embeddings"] == 1500


def test_export_is_whole_checked_and_done_once(recipe, capsys):
    directory = export_head(recipe, serve_check=False)
    manifest = provenance.require(directory, "head", "")
    assert set(manifest["files"]) == {"config.json", "model.safetensors"}
    assert manifest["counts"]["serve_check"] is None
    assert manifest["counts"]["top_draft_agreement"] > 0.8
    written = load_file(directory / "model.safetensors")
    masters = open_checkpoint(recipe, None, load_target_spec(recipe.target_path)).weights()
    for name, tensor in written.items():
        wanted = masters[name].bfloat16() if masters[name].is_floating_point() else masters[name]
        assert tensor.dtype == wanted.dtype
        assert torch.equal(tensor, wanted)  # rounded once, from float32
    assert export_head(recipe, serve_check=False) == directory
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("head.norm_before_residual=true", r"head.norm_before_residual: trained False, to be served True"),
        ("target.aux_layer_ids=[1,4,6]", r"target.aux_layer_ids: trained \[2, 4, 6\], to be served \[1, 4, 6\]"),
        ("engine.max_model_len=4096", r"max_position_embeddings: 4096 to be served, 2048 in the head"),
    ],
)
def test_a_recipe_that_would_serve_another_head_is_refused(recipe, tmp_path, override, message):
    changed = recipe_at(tmp_path, override)
    with pytest.raises(ValueError, match=message):
        export_head(changed, serve_check=False)
    assert not changed.head_dir.exists()
    export_head(recipe, serve_check=False)  # the failed attempt claims nothing


def test_a_failed_check_leaves_nothing_to_serve(recipe, monkeypatch):
    def wrong(*_args):
        raise ValueError("the engine disagrees")

    monkeypatch.setattr(exporting, "check_serving", wrong)
    with pytest.raises(ValueError, match="the engine disagrees"):
        export_head(recipe)
    assert not recipe.head_dir.exists()


def test_a_killed_export_has_no_config_and_is_resumed(recipe, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(exporting, "check_reload", lambda *_: 1 / 0)
        # As SIGKILL would leave it.
        patch.setattr(exporting, "shutil", SimpleNamespace(rmtree=lambda *_args, **_options: None))
        with pytest.raises(ZeroDivisionError):
            export_head(recipe, serve_check=False)
    assert {p.name for p in recipe.head_dir.iterdir()} == {".candidate", provenance.IDENTITY}
    export_head(recipe, serve_check=False)
    assert not (recipe.head_dir / ".candidate").exists()
    assert not provenance.verify_files(recipe.head_dir)


def test_reload_finds_a_single_changed_weight(recipe):
    shape = draft_shape(recipe, load_target_spec(recipe.target_path))
    directory = export_head(recipe, serve_check=False)
    weights = load_file(recipe.run_dir / "checkpoints/step_00000007/model.safetensors")
    tensors = load_file(directory / "model.safetensors")
    tensors["fc.weight"][3, 5] += 1
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ValueError, match="does not give the training module's logits: largest difference"):
        check_reload(directory, weights, shape, "bfloat16")


def test_the_whole_vocabulary_is_exported_without_maps(tmp_path):
    recipe = recipe_at(tmp_path, "head.draft_vocab_size=3072")
    write_run(recipe)
    tensors = load_file(export_head(recipe, serve_check=False) / "model.safetensors")
    assert not {"d2t", "t2d"} & tensors.keys()
    assert tensors["lm_head.weight"].shape[0] == 3072


def test_a_checkpoint_outside_its_run_is_refused(recipe, tmp_path):
    shutil.copytree(recipe.run_dir / "checkpoints/step_00000007", tmp_path / "elsewhere/a/step_00000007")
    spec = load_target_spec(recipe.target_path)
    with pytest.raises(provenance.ArtefactError, match="does not lie in the run that wrote it"):
        open_checkpoint(recipe, tmp_path / "elsewhere/a/step_00000007", spec)
