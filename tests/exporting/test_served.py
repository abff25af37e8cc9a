"""What vLLM will read in a config.json, and the shape that is to be served."""

import json

import pytest

from drafthead.drafters.base import draft_shape
from drafthead.exporting.contract import head_config
from drafthead.exporting.rope import served_shape
from drafthead.exporting.served import check_served
from drafthead.target.pieces import load_target_spec
from tests.exporting.runs import recipe_at

TAPS = (2, 4, 6)


@pytest.fixture
def shape(tmp_path):
    recipe = recipe_at(tmp_path)
    return draft_shape(recipe, load_target_spec(recipe.target_path))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_before_residual": True}, "norm_before_residual: trained False, served True"),
        ({"fc_norm": True}, "fc_norm: trained False, served True"),
        ({"norm_output": True}, "norm_output: trained False, served True"),
        ({"eagle_config": {}, "norm_before_fc": False}, "norm_before_fc: trained True, served False"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
            r"aux layers \(model runner V1\): trained \[2, 4, 6\], served \[1",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": None},
            r"aux layers \(model runner V2\): .* served \"the target's default\"",
        ),
        ({"num_aux_hidden_states": 4}, "aux layers that fc is sized for: trained 3, served 4"),
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
