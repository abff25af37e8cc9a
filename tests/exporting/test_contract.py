"""An exported head's names, shapes and keys, and the refusals that protect them."""

import pytest
import torch

from drafthead.config import load_recipe
from drafthead.drafters.base import draft_shape
from drafthead.drafters.eagle3.model import DraftModel
from drafthead.drafters.vocabulary import choose_vocabulary
from drafthead.exporting.contract import check_tensors, head_config
from drafthead.exporting.head import export_head
from drafthead.provenance import ArtefactError, begin, finish
from drafthead.target.pieces import load_target_spec


@pytest.fixture
def shape():
    recipe = load_recipe(overrides=["head.num_layers=2", "head.fc_norm=true"])
    return draft_shape(recipe, load_target_spec(recipe.target_path))


@pytest.fixture
def tensors(shape):
    vocabulary = choose_vocabulary(torch.arange(shape.vocab_size), shape.head.draft_vocab_size, torch.tensor([1]))
    return {**DraftModel(shape).state_dict(), "d2t": vocabulary.d2t, "t2d": vocabulary.t2d}


def test_names_are_those_vllm_reads(shape, tensors):
    check_tensors(tensors, shape)
    assert {name for name in tensors if not name.startswith(("midlayer.", "layers.1."))} == {
        "fc.weight", "input_norm.weight", "fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight", "norm.weight",
        "lm_head.weight", "d2t", "t2d",
    }  # fmt: skip
    assert tensors["midlayer.self_attn.q_proj.weight"].shape[1] == 2 * shape.hidden_size
    assert tensors["layers.1.self_attn.q_proj.weight"].shape[1] == shape.hidden_size
    assert "midlayer.hidden_norm.weight" in tensors
    assert "layers.1.hidden_norm.weight" not in tensors


def test_aux_layer_ids_stand_in_all_three_places(shape):
    config = head_config(shape, (2, 4, 8), "bfloat16", 4096)
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 8]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [2, 4, 8]
    assert config["num_aux_hidden_states"] == 3
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "max_position_embeddings"):
        assert key in config
    assert config["vocab_size"] == shape.vocab_size
    assert config["draft_vocab_size"] == shape.head.draft_vocab_size


def test_every_defect_is_named(shape, tensors):
    del tensors["lm_head.weight"]
    tensors["model.fc.weight"] = tensors["fc.weight"]
    tensors["norm.weight"] = tensors["norm.weight"][:3]
    tensors["input_norm.weight"] = tensors["input_norm.weight"].clone()
    tensors["input_norm.weight"][0] = float("nan")
    with pytest.raises(ValueError, match=r"lm_head.weight: missing") as error:
        check_tensors(tensors, shape)
    for text in ("model.fc.weight: not part of a head", "norm.weight: shape (3,)", "input_norm.weight: has values"):
        assert text in str(error.value)


def test_a_vocabulary_map_that_contradicts_itself_is_refused(shape, tensors):
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])
    with pytest.raises(ValueError, match="d2t maps to"):
        check_tensors(tensors, shape)


def test_missing_run_and_missing_checkpoint_say_what_to_do(tmp_path):
    recipe = load_recipe(overrides=[f"output_dir={tmp_path}"])
    with pytest.raises(ArtefactError, match=r"does not exist; run: accelerate launch train/eagle3.py"):
        export_head(recipe)
    begin(recipe.run_dir, "run", {})
    finish(recipe.run_dir, {"best_step": 5})
    with pytest.raises(ArtefactError, match=r"step_00000005 is not a checkpoint.*has: none"):
        export_head(recipe)
