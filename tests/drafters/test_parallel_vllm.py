"""Files of P-EAGLE, DFlash and DSpark heads: what is written, what vLLM reads of it, and the refusals between them."""

import pytest

from drafthead.drafters.registry import drafter_of
from drafthead.drafters.vllm import check_config
from drafthead.engine.offline import import_vllm
from tests.exporting.runs import config_of, recipe_at, shape_of

LAYERS = (2, 4, 6)


@pytest.fixture(params=["peagle", "dflash", "dspark", "dflash head.causal=false head.attention_sinks=true"])
def recipe(request, tmp_path):
    kind, *more = request.param.split()
    return recipe_at(
        tmp_path, f"head.type={kind}", "head.mask_token_id=9", "head.num_draft_positions=4",
        "head.num_layers=2", "head.sliding_window=32", *more,
    )  # fmt: skip


def test_what_vllm_would_read_otherwise_is_refused(recipe):
    """Layer ids of block drafters count blocks, one less than boundaries."""
    shape, config = shape_of(recipe), config_of(recipe)
    dflash, changes = config.get("dflash_config"), [("ptd_token_id", 8, "9")]
    if dflash:
        changes = [("mask_token_id", 8, "9"), ("target_layer_ids", [2, 4, 6], r"\[1, 3, 5\]")]
        changes += [(key, not dflash[key], str(dflash[key])) for key in ("causal", "attention_sink_bias")]
    for key, value, expected in changes:
        changed = {**config, "dflash_config": {**dflash, key: value}} if dflash else {**config, key: value}
        with pytest.raises(ValueError, match=rf"{key}: found .*, wanted {expected}"):
            check_config(changed, shape, LAYERS, recipe.engine.max_model_len)


@pytest.mark.parametrize(
    ("changes", "dflash", "window", "causal"),
    [
        ({"layer_types": None}, {}, None, False),
        ({}, {}, 32, True),  # layers with a window are causal where nothing is said of it
        ({}, {"causal": False}, 32, False),
        ({"layer_types": None}, {"use_swa": True}, 32, False),
        ({"layer_types": ["full_attention"] * 2}, {"use_swa": True, "swa_window_size": 64}, 64, False),
        ({"is_causal": False}, {"causal": True, "swa_window_size": 16}, 16, False),
    ],
)
def test_a_public_dflash_heads_window_is_read_as_vllm_reads_it(tmp_path, changes, dflash, window, causal):
    from transformers import Qwen3Config

    recipe = recipe_at(
        tmp_path, "head.type=dflash", "head.mask_token_id=9", "head.num_layers=2", "head.sliding_window=32"
    )
    config = config_of(recipe)
    block = {key: value for key, value in config["dflash_config"].items() if key != "causal"}
    config = {**config, **changes, "dflash_config": {**block, **dflash}}
    served = drafter_of(recipe.head).vllm.served_values(config)
    assert (served["sliding_window"], served["dflash_config.causal"]) == (window, causal)
    import_vllm()
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.models.qwen3_dflash import _resolve_layer_attention

    with set_current_vllm_config(VllmConfig()):
        parsed = Qwen3Config(**{key: value for key, value in config.items() if key != "model_type"})
        assert [_resolve_layer_attention(parsed, layer) for layer in range(2)] == [(window, causal)] * 2


def test_what_a_head_multiplies_or_rotates_otherwise_is_refused(recipe):
    """Keys that leave no trace in the tensors."""
    shape, config, positions = shape_of(recipe), config_of(recipe), recipe.engine.max_model_len
    with pytest.raises(ValueError, match=r"logit_scale=0\.5, supported is 1\.0.*eval\.methods"):
        check_config({**config, "logit_scale": 0.5}, shape, LAYERS, positions)
    if dflash := config.get("dflash_config"):
        with pytest.raises(ValueError, match=r"attention_value_scale=0\.5"):
            check_config(
                {**config, "dflash_config": {**dflash, "attention_value_scale": 0.5}}, shape, LAYERS, positions
            )
        with pytest.raises(ValueError, match="is_neox_style=False"):
            check_config({**config, "is_neox_style": False}, shape, LAYERS, positions)


def test_the_speculators_layout_holds_the_same_head_or_is_refused(recipe):
    vllm, config = drafter_of(recipe.head).vllm, config_of(recipe)
    if recipe.head.type == "peagle":
        nested = vllm.speculators_config(config, 3, {"name_or_path": "org/target"})
        assert vllm.served_values(nested) == vllm.served_values(config)
        return
    with pytest.raises(ValueError, match=r"export\.format"):
        vllm.speculators_config(config, 3, {})
