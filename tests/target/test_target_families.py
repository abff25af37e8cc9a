"""Targets of other families than the embedded one: their own logits and rotation, or a refusal by name."""

import re
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from drafthead.target.pieces import CENTRED_NORMS, TargetHead, load_pieces, load_target_spec
from drafthead.target.rope import head_rope
from tests.damage import edit_config

SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
FAMILIES = {"llama": {}, "qwen3": {}, "gemma": {}, "gemma3_text": {}, "qwen3_next": EXPERTS}


@torch.no_grad()
@pytest.mark.parametrize("family", FAMILIES)
def test_the_final_norm_is_the_familys(family, tmp_path):
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **SHAPE, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        if name == "model.norm.weight":
            weight.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(tmp_path)
    found: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: found.append(inputs[0]))
    wanted = model(torch.arange(1, 9)[None], use_cache=False).logits[0]
    torch.testing.assert_close(TargetHead.load(str(tmp_path), dtype="float32").logits(found[0][0]), wanted)


def test_embeddings_are_tied_where_the_family_ties_them_and_config_json_is_silent(tmp_path):
    """As Gemma is published."""
    config = AutoConfig.for_model("gemma3_text", **SHAPE)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"none of the tensors lm_head\.weight"):
        load_pieces(str(tmp_path))
    edit_config(tmp_path, tie_word_embeddings=None)
    pieces = load_pieces(str(tmp_path))
    assert pieces.lm_head is pieces.embed_tokens


def test_every_family_of_transformers_whose_norm_adds_one_is_known():
    models, found = Path(transformers.__file__).parent / "models", set()
    for source in models.glob("*/modeling_*.py"):
        text = source.read_text(encoding="utf-8")
        classes = re.split(r"^class ", text, flags=re.MULTILINE)
        centred = {body.split("(")[0] for body in classes if re.search(r"1(\.0)? \+ self\.weight", body)}
        final = set(re.findall(r"self\.(?:final_)?norm = (\w+)\(", text))
        if centred & final and not source.parent.name.startswith("t5"):  # an encoder and a decoder
            assert source.parent.name in CENTRED_NORMS, f"{source.parent.name}: {centred & final}"
            found.add(source.parent.name)
    assert {"gemma", "qwen3_next"} <= found


def test_a_head_rotates_its_whole_head_dim_as_layers_of_full_attention():
    plain = {"rope_type": "default", "rope_theta": 1e6}
    for given in (
        {"rope_parameters": {**plain, "partial_rotary_factor": 0.25, "mrope_section": [8, 12, 12]}},
        {"rope_parameters": {"sliding_attention": {**plain, "rope_theta": 1e4}, "full_attention": plain}},
        {"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}, "rope_theta": 1e6},
        {"rope_scaling": None, "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    ):
        assert head_rope(given, "target") == plain


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            r"rotates by longrope: .* known ones: default",
        ),
        ({"lm_head_multiplier": 0.04}, r"lm_head_multiplier=0\.04: its logits are not lm_head"),
        ({"dim_model_base": 256}, r"dim_model_base=256"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30\.0"),
    ],
)
def test_what_is_not_computed_is_refused(target, changes, named):
    edit_config(target, **changes)
    with pytest.raises(ValueError, match=named):
        load_target_spec(str(target))
