"""The speculators layout: what vLLM's own reader makes of it, and that it is the same head."""

import json

import pytest
import torch
from safetensors.torch import load_file

from drafthead.drafters.base import draft_shape
from drafthead.exporting.contract import checkpoint_tensors, head_config
from drafthead.exporting.head import export_head
from drafthead.exporting.served import check_served, served_values
from drafthead.exporting.speculators import from_speculators, to_speculators
from drafthead.target.pieces import load_target_spec
from tests.exporting.runs import recipe_at, write_run
from tests.recipes import changed

FOUR_TAPS = ("target.aux_layer_ids=[0,2,5,8]", "head.norm_before_residual=false", "head.fc_norm=true")


@pytest.fixture
def recipe(tmp_path):
    recipe = recipe_at(tmp_path, *FOUR_TAPS, "export.format=speculators")
    write_run(recipe)
    return recipe


def test_both_layouts_hold_the_same_head(recipe):
    plain = changed(recipe, "export", format="vllm")
    ours, theirs = export_head(plain, serve_check=False), export_head(recipe, serve_check=False)
    assert (ours.name, theirs.name) == ("tiny", "tiny-speculators")
    one, other = load_file(ours / "model.safetensors"), load_file(theirs / "model.safetensors")
    assert "layers.0.hidden_norm.weight" in other
    other = checkpoint_tensors(other)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    configs = [json.loads((d / "config.json").read_text()) for d in (ours, theirs)]
    assert served_values(configs[0]) == served_values(configs[1])


def test_a_key_left_where_vllm_does_not_look_is_refused(recipe):
    shape = draft_shape(recipe, load_target_spec(recipe.target_path))
    plain = head_config(shape, recipe.target.aux_layer_ids, "bfloat16", 2048)
    config = to_speculators(plain, "org/target", ["GptOssForCausalLM"], 3)
    check_served(config, shape, recipe.target.aux_layer_ids, 1024)
    del config["norm_before_residual"]  # where this layout defaults to true
    del config["transformer_layer_config"]["num_aux_hidden_states"]
    del config["transformer_layer_config"]["eagle_config"]
    with pytest.raises(ValueError, match="norm_before_residual: trained False, served True") as error:
        check_served(config, shape, recipe.target.aux_layer_ids, 1024)
    assert "aux layers that fc is sized for: trained 4, served 3" in str(error.value)
    with pytest.raises(ValueError, match="'peagle' is not eagle3"):
        from_speculators({"speculators_model_type": "peagle"})


@pytest.mark.slow
def test_vllm_reads_what_we_say_it_reads(recipe):
    from drafthead.engine.offline import import_vllm

    import_vllm()
    from vllm.transformers_utils.config import get_config, maybe_override_with_speculators

    directory = export_head(recipe, serve_check=False)
    parsed = get_config(str(directory), trust_remote_code=False)
    shape = draft_shape(recipe, load_target_spec(recipe.target_path))
    assert type(parsed).__name__ == "SpeculatorsConfig"
    assert parsed.architectures == ["Eagle3LlamaForCausalLM"]
    check_served(parsed.to_dict(), shape, recipe.target.aux_layer_ids, 1024)
    model, tokenizer, speculative = maybe_override_with_speculators(str(directory), None, False)
    assert model == tokenizer == recipe.target_path
    assert speculative == {"method": "eagle3", "num_speculative_tokens": 3, "model": str(directory)}
