"""Export as a whole: what it proves, what it refuses, and what it leaves behind when it fails or is killed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafthead import provenance
from drafthead.exporting import head as exporting
from drafthead.exporting.checkpoint import open_checkpoint
from drafthead.exporting.contract import head_config
from drafthead.exporting.head import export_head
from drafthead.exporting.reload import check_reload
from drafthead.exporting.rope import served_shape
from drafthead.exporting.served import check_served, served_values
from drafthead.models.draft import draft_shape
from drafthead.models.target import load_target_spec
from tests.exporting.runs import recipe_at, write_run

TAPS = (2, 4, 6)


@pytest.fixture
def recipe(tmp_path):
    recipe = recipe_at(tmp_path)
    write_run(recipe)
    return recipe


@pytest.fixture
def shape(tmp_path):
    recipe = recipe_at(tmp_path)
    return draft_shape(recipe, load_target_spec(recipe.target_path))


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
        ("target.tap_ids=[1,4,6]", r"target.tap_ids: trained \[2, 4, 6\], to be served \[1, 4, 6\]"),
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
        patch.setattr(exporting.shutil, "rmtree", lambda *_args, **_options: None)  # as SIGKILL would leave it
        with pytest.raises(ZeroDivisionError):
            export_head(recipe, serve_check=False)
    assert {p.name for p in recipe.head_dir.iterdir()} == {".candidate", provenance.IDENTITY}
    export_head(recipe, serve_check=False)
    assert not (recipe.head_dir / ".candidate").exists()
    assert not provenance.verify_files(recipe.head_dir)


def test_a_head_exported_unchecked_is_checked_by_the_next_call(recipe, monkeypatch):
    before = provenance.reference(provenance.require(export_head(recipe, serve_check=False), "head", ""))
    monkeypatch.setattr(exporting, "_judge", lambda *_: {"serve_check": {"served": 1.5}})
    export_head(recipe)
    manifest = provenance.require(recipe.head_dir, "head", "")
    assert manifest["counts"]["serve_check"] == {"served": 1.5}
    assert provenance.reference(manifest) == before  # results measured with the head stay valid


def test_reload_finds_a_single_changed_weight(recipe, shape):
    directory = export_head(recipe, serve_check=False)
    weights = load_file(recipe.run_dir / "checkpoints/step_00000007/model.safetensors")
    tensors = load_file(directory / "model.safetensors")
    tensors["fc.weight"][3, 5] += 1
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ValueError, match="does not give the training module's logits: largest difference"):
        check_reload(directory, weights, shape, "bfloat16")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_before_residual": True}, "norm_before_residual: trained False, served True"),
        ({"fc_norm": True}, "fc_norm: trained False, served True"),
        ({"norm_output": True}, "norm_output: trained False, served True"),
        ({"eagle_config": {}, "norm_before_fc": False}, "norm_before_fc: trained True, served False"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, r"taps \(model runner V1\): trained \[2, 4, 6\], served \[1"),
        ({"eagle_aux_hidden_state_layer_ids": None}, r"taps \(model runner V2\): .* served \"the target's default\""),
        ({"num_aux_hidden_states": 4}, "taps that fc is sized for: trained 3, served 4"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, r"rope rope_type: trained 'yarn', served"),
        ({"draft_vocab_size": None}, "draft_vocab_size: trained 256, served 3072"),
        ({"head_dim": None}, "head_dim: trained 32, served 96"),
        ({"max_position_embeddings": 512}, "max_position_embeddings: 1024 to be served, 512 in the head"),
    ],
)
def test_a_config_that_vllm_reads_otherwise_is_refused(shape, change, message):
    config = json.loads(json.dumps(head_config(shape, TAPS, "bfloat16", 2048)))
    check_served(config, shape, TAPS, 1024)
    with pytest.raises(ValueError, match=message):
        check_served(config | change, shape, TAPS, 1024)


def test_the_nested_switch_wins_over_the_one_beside_it(shape):
    config = head_config(shape, TAPS, "bfloat16", 2048)
    config["eagle_config"]["norm_before_fc"] = False
    with pytest.raises(ValueError, match="norm_before_fc: trained True, served False"):
        check_served(config, shape, TAPS, 1024)


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


def test_yarn_stretches_an_unscaled_rotation_only(tmp_path, shape):
    export = recipe_at(tmp_path, "export.yarn_from=512", "export.max_position_embeddings=2048").export
    with pytest.raises(ValueError, match="the target's rotation is already yarn"):
        served_shape(shape, export)
    plain = {"rope_type": "default", "rope_theta": 1e4}
    object.__setattr__(shape, "rope_parameters", plain)
    stretched = served_shape(shape, export)
    assert stretched.rope_parameters["rope_type"] == "yarn"
    assert stretched.rope_parameters["factor"] == 4
    assert stretched.rope_parameters["original_max_position_embeddings"] == 512
    assert stretched.max_position_embeddings == 2048
    check_served(head_config(stretched, TAPS, "bfloat16", 2048), stretched, TAPS, 2048)
    short = export.model_copy(update={"yarn_from": 4096})
    with pytest.raises(ValueError, match="export.yarn_from 4096 is not below the 2048 positions"):
        served_shape(shape, short)
