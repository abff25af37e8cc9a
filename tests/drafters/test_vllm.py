"""config.json and tensors of EAGLE-3 heads: what is written, what vLLM reads of it, and the refusals between them."""

from dataclasses import replace

import pytest
import torch

from drafthead.drafters.eagle3.drafter import Eagle3
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.vllm import check_config, check_tensors
from tests.exporting.runs import config_of, random_weights, recipe_at, shape_of

LAYER_IDS = (2, 4, 6)


@pytest.fixture
def recipe(tmp_path):
    return recipe_at(tmp_path)


@pytest.fixture
def two_layers(tmp_path):
    return shape_of(recipe_at(tmp_path, "head.num_layers=2", "head.fc_norm=true"))


def test_every_defect_is_named(two_layers):
    tensors = random_weights(two_layers)
    del tensors["lm_head.weight"]
    tensors["model.fc.weight"] = tensors["fc.weight"]
    tensors["norm.weight"] = tensors["norm.weight"][:3]
    tensors["input_norm.weight"] = tensors["input_norm.weight"].clone()
    tensors["input_norm.weight"][0] = float("nan")
    with pytest.raises(ValueError, match=r"lm_head.weight") as error:
        check_tensors(tensors, two_layers)
    for name in ("model.fc.weight: ", "\n  norm.weight: found (3,)", "input_norm.weight: "):
        assert name in str(error.value)


def test_a_vocabulary_map_that_contradicts_itself_is_refused(two_layers):
    tensors = random_weights(two_layers)
    tensors["d2t"] = torch.zeros_like(tensors["d2t"])
    with pytest.raises(ValueError, match="d2t .* t2d"):
        check_tensors(tensors, two_layers)


def test_the_same_tensor_under_two_names_is_refused():
    with pytest.raises(ValueError, match="model"):
        Eagle3.vllm.checkpoint_tensors({"fc.weight": torch.ones(1), "model.fc.weight": torch.ones(1)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_before_residual": True}, "norm_before_residual: found True, wanted False"),
        ({"fc_norm": True}, "fc_norm: found True, wanted False"),
        ({"norm_output": True}, "norm_output: found True, wanted False"),
        ({"eagle_config": {}, "norm_before_fc": False}, "norm_before_fc: found False, wanted True"),
        # The nested switch goes before the one beside it.
        ({"eagle_config": {"norm_before_fc": False}}, "norm_before_fc: found False, wanted True"),
        # Model runner V1 reads either place, V2 the top level only.
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 5]}, r"eagle_config.eagle_aux\w+: found \[1, 3, 5\], wanted \[2"),
        ({"eagle_aux_hidden_state_layer_ids": None}, r"  eagle_aux\w+: found \"the target's default\", wanted \[2"),
        ({"num_aux_hidden_states": 4}, "num_aux_hidden_states: found 4, wanted 3"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "rope_type: found 'default', wanted 'yarn'"),
        ({"draft_vocab_size": None}, "draft_vocab_size: found 3072, wanted 256"),
        ({"head_dim": None}, "head_dim: found 96, wanted 32"),
        ({"max_position_embeddings": 512}, "max_position_embeddings: found 512, wanted 1024"),
        ({"sliding_window": 8, "layer_types": ["sliding_attention"]}, "sliding_window: found 8, wanted None"),
        ({"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}, "layers differ"),
    ],
)
def test_a_config_that_vllm_reads_otherwise_is_refused(recipe, change, message):
    config, shape = config_of(recipe), shape_of(recipe)
    check_config(config, shape, LAYER_IDS, 1024)
    with pytest.raises(ValueError, match=message):
        check_config(config | change, shape, LAYER_IDS, 1024)


@pytest.mark.parametrize("layout", ["vllm", "speculators"])
def test_a_window_is_served_where_the_layer_types_say_so(tmp_path, layout):
    recipe = recipe_at(tmp_path, "head.sliding_window=64", "head.num_layers=2", f"export.format={layout}")
    config, shape = config_of(recipe), shape_of(recipe)
    check_config(config, shape, LAYER_IDS, 1024)
    (config if layout == "vllm" else config["transformer_layer_config"]).pop("layer_types")
    with pytest.raises(ValueError, match="sliding_window: found None, wanted 64"):
        check_config(config, shape, LAYER_IDS, 1024)


def test_a_rotation_that_states_a_key_as_null_is_the_same_rotation(recipe):
    shape = shape_of(recipe)
    stated = replace(shape, rope_parameters={**shape.rope_parameters, "attention_factor": None})
    check_config(config_of(recipe), stated, LAYER_IDS, 1024)


def test_a_key_left_where_vllm_does_not_look_is_refused(tmp_path):
    layers = ("target.aux_layer_ids=[0,2,5,8]", "head.norm_before_residual=false", "head.fc_norm=true")
    recipe = recipe_at(tmp_path, *layers, "export.format=speculators")
    config, shape = config_of(recipe), shape_of(recipe)
    check_config(config, shape, recipe.target.aux_layer_ids, 1024)
    del config["norm_before_residual"]  # where this layout defaults to true
    del config["transformer_layer_config"]["num_aux_hidden_states"]
    del config["transformer_layer_config"]["eagle_config"]
    with pytest.raises(ValueError, match="norm_before_residual: found True, wanted False") as error:
        check_config(config, shape, recipe.target.aux_layer_ids, 1024)
    assert "num_aux_hidden_states: found 3, wanted 4" in str(error.value)
    with pytest.raises(ValueError, match="peagle"):
        Eagle3.vllm.served_values({"speculators_model_type": "peagle"})


def test_a_mask_token_may_be_token_0(tmp_path):
    recipe = recipe_at(tmp_path, "head.type=peagle", "head.mask_token_id=0", "head.fc_norm=true")
    config, vllm = config_of(recipe), drafter_of(recipe.head).vllm
    check_config(config, shape_of(recipe), LAYER_IDS, 1024)
    config["mask_token_id"] = config.pop("ptd_token_id")  # as speculators' heads name it
    assert vllm.served_values(config)["ptd_token_id"] == 0
