"""The frozen pieces of a target: found by name, checked, and equal to what the whole model computes in each family."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from drafthead.config import load_recipe
from drafthead.files import ForeignFileError
from drafthead.target.files import pinned_revision
from drafthead.target.pieces import CENTRED_NORMS, FrozenTarget, TargetHead, TargetPieces, load_pieces
from drafthead.target.rope import head_rope
from drafthead.target.spec import captured_ids, load_target_spec
from tests.damage import edit_config, replace_tensors
from tests.scripts import run_here

TARGET = load_recipe().target_path


def test_the_embedded_targets_config_is_read():
    spec = load_target_spec(TARGET)
    assert (spec.hidden_size, spec.num_layers, spec.model_type) == (192, 8, "gpt_oss")
    assert spec.rope_parameters["rope_type"] == "yarn"
    assert captured_ids(spec, (2, 4)) == (2, 4, 8)
    assert captured_ids(spec, (2, 8)) == (2, 8)  # L is never captured twice


def test_what_is_missing_is_named(target: Path):
    with pytest.raises(FileNotFoundError, match=r"/nowhere/target does not exist: give a directory"):
        load_target_spec("/nowhere/target")
    (target / "model.safetensors").unlink()
    spec = load_target_spec(str(target))  # a plan needs no weights
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        _ = spec.fingerprint
    (target / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        load_target_spec(str(target))


def assert_same(actual: TargetPieces, expected: TargetPieces) -> None:
    for piece in ("embed_tokens", "final_norm", "lm_head"):
        torch.testing.assert_close(getattr(actual, piece), getattr(expected, piece), rtol=0, atol=0)


def in_shards(target: Path, *shards: dict[str, torch.Tensor]) -> None:
    """Replace the file of weights by 0.safetensors, 1.safetensors and their index."""
    (target / "model.safetensors").unlink()
    weight_map = {name: f"{i}.safetensors" for i, shard in enumerate(shards) for name in shard}
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    for i, shard in enumerate(shards):
        save_file(shard, target / f"{i}.safetensors")


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", ""])
def test_pieces_are_found_by_the_names_of_every_family(target: Path, prefix):
    whole, expected = load_file(target / "model.safetensors"), load_pieces(str(target))
    save_file({n.replace("model.", prefix, 1): t for n, t in whole.items()}, target / "model.safetensors")
    assert_same(load_pieces(str(target)), expected)


def test_pieces_are_found_in_shards_and_in_tied_embeddings(target: Path):
    whole = load_file(target / "model.safetensors")
    expected = load_pieces(str(target))
    torch.testing.assert_close(expected.lm_head, whole["lm_head.weight"], rtol=0, atol=0)

    names = sorted(whole)
    in_shards(target, *({name: whole[name] for name in names[first::2]} for first in (0, 1)))
    assert_same(load_pieces(str(target)), expected)

    edit_config(target, tie_word_embeddings=True)
    tied = load_pieces(str(target))
    assert tied.lm_head is tied.embed_tokens


def test_a_quantised_lm_head_is_refused(target: Path):
    """Its values mean nothing without their scale, which no argmax shows where there is one for all."""
    path = target / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"lm_head.weight": weights["lm_head.weight"].to(torch.float8_e4m3fn)}, path)
    with pytest.raises(ForeignFileError, match="lm_head.weight in torch.float8_e4m3fn"):
        load_pieces(str(target))


def test_pieces_of_an_mxfp4_checkpoint_are_read_without_its_experts(target: Path):
    """As gpt-oss is published: experts as uint8 blocks and scales; here their shard has no more than its header."""
    whole = load_file(target / "model.safetensors")
    expected = load_pieces(str(target))
    edit_config(target, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    packed = {
        f"{name}_{part}": torch.zeros(2, 8, 16 if part == "blocks" else 1, dtype=torch.uint8)
        for name in whole
        if ".experts." in name and "bias" not in name
        for part in ("blocks", "scales")
    }
    assert packed
    in_shards(target, {name: tensor for name, tensor in whole.items() if ".experts." not in name}, packed)
    experts = target / "1.safetensors"
    os.truncate(experts, experts.stat().st_size - sum(tensor.nbytes for tensor in packed.values()))
    with pytest.raises(SafetensorError):
        safe_open(experts, framework="pt")
    assert_same(load_pieces(str(target)), expected)


def test_fingerprint_sees_other_weights_of_the_same_shape(target: Path):
    before = load_target_spec(str(target)).fingerprint
    assert before == load_target_spec(TARGET).fingerprint
    weights = load_file(target / "model.safetensors")
    save_file({name: tensor + 0.01 for name, tensor in weights.items()}, target / "model.safetensors")
    assert load_target_spec(str(target)).fingerprint != before


def test_stats_do_not_depend_on_the_chunk():
    head = TargetHead.load(TARGET)
    hidden = torch.randn(37, 192, generator=torch.Generator().manual_seed(0)).bfloat16()
    whole, parts = head.stats(hidden), head.stats(hidden, chunk=5)
    torch.testing.assert_close(whole[0], parts[0])
    torch.testing.assert_close(whole[1], parts[1])


def test_nothing_lies_outside_of_a_whole_vocabulary_at_any_temperature():
    """In bf16, where logits that were rounded would leave a part over."""
    torch.manual_seed(0)
    rows, states = torch.randn(512, 64).bfloat16(), 2 * torch.randn(20, 64).bfloat16()
    target = FrozenTarget(rows, torch.ones(64), rows, 1e-5, torch.arange(512))
    logits = states.float() @ rows.float().T
    for T in (0.7, 1.5):
        lse_at_T = target.lse_at(T, states, logits.logsumexp(-1))
        torch.testing.assert_close(lse_at_T, (logits / T).logsumexp(-1), rtol=0, atol=1e-3)


def test_what_is_fetched_later_is_of_the_commit_that_was_fetched_first(hub_cache, monkeypatch):
    """Only small files at first; then the branch moves on, and the weights are asked for."""
    model, branch, asked = hub_cache / "models--acme--tiny", ["a" * 40, "b" * 40], []

    def fetch(path: str, revision: str | None, allow_patterns: list[str]) -> str:
        """As the hub's client does, which remembers the commit that a branch is at."""
        asked.append((revision or branch[0], allow_patterns))
        snapshot = model / "snapshots" / asked[-1][0]
        for folder in (snapshot, model / "refs"):
            folder.mkdir(parents=True, exist_ok=True)
        if revision is None:
            (model / "refs" / "main").write_text(branch[0])
        for name in allow_patterns:
            if (Path(TARGET) / name).is_file():
                shutil.copy(Path(TARGET) / name, snapshot)
        return str(snapshot)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    first = load_target_spec("acme/tiny").fingerprint
    assert not any("model.safetensors" in names for _, names in asked)
    branch.pop(0)
    load_pieces("acme/tiny")
    assert first == pinned_revision("acme/tiny") == "a" * 40
    assert {commit for commit, names in asked if "model.safetensors" in names} == {first}


# Other families than the embedded target's: their own logits and rotation, or a refusal by name


SHAPE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {
    "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16,
    "linear_num_key_heads": 1, "linear_num_value_heads": 1, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
ROUTED = {
    **EXPERTS, "num_local_experts": 2, "n_routed_experts": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES = {"llama": {}, "qwen3": {}, "gemma": {}, "gemma3_text": {}, "qwen3_next": EXPERTS}
LOGIT_KEYS = re.compile("logit|scal|mult|soft_?cap|mup")


@torch.no_grad()
def logits_of(config, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """What goes into the final norm of a random model that is written to a folder, (8, H), and its logits (8, V)."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for name, weight in model.named_parameters():
        if ".layers." not in name and weight.dim() < 2:  # norms and biases that do something
            weight.add_(0.3 * torch.randn_like(weight))
    model.save_pretrained(folder)
    inputs: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, arguments: inputs.append(arguments[0]))
    logits = model(torch.arange(1, 9)[None], use_cache=False).logits[0]
    return inputs[-1].reshape(8, -1), logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_final_norm_is_the_familys(family, tmp_path):
    hidden, expected = logits_of(AutoConfig.for_model(family, **SHAPE, **FAMILIES[family]), tmp_path)
    head = TargetHead.load(str(tmp_path), dtype="float32")
    torch.testing.assert_close(head.logits(hidden), expected)
    argmax, lse = head.stats(hidden, chunk=3)
    assert argmax.dtype == torch.int32
    assert argmax.tolist() == expected.argmax(-1).tolist()
    torch.testing.assert_close(lse, expected.logsumexp(-1))
    assert [t.shape for t in head.stats(hidden[:0])] == [torch.Size([0]), torch.Size([0])]


@pytest.mark.slow
def test_of_every_family_of_transformers_the_logits_are_ours_or_it_is_refused(tmp_path):
    """Each with its defaults, and with every number that may scale or cap logits set to another."""
    computed, refused, sizes = set(), set(), {**SHAPE, "num_hidden_layers": 2, **ROUTED, **MLA}
    for family in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = AutoConfig.for_model(family, **sizes)
            with torch.device("meta"):
                count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        except Exception:  # its sizes have other names, or exclude one another
            continue
        if count > 3e6 or "text_config" in config.to_dict():
            continue
        numbers = {k: v for k, v in config.to_dict().items() if LOGIT_KEYS.search(k) and type(v) in (int, float)}
        for changes in ({}, *({key: 3 * value} for key, value in numbers.items())):
            folder = tmp_path / "-".join([family, *changes])
            try:
                hidden, expected = logits_of(AutoConfig.for_model(family, **{**sizes, **changes}), folder)
            except Exception:  # no decoder as others are, or a value that it does not take
                continue
            try:
                head = TargetHead.load(str(folder), dtype="float32")
            except ValueError:
                refused.add(folder.name)
            else:
                computed.add(folder.name)
                assert torch.allclose(head.logits(hidden), expected, rtol=1e-4, atol=1e-5), folder.name
            shutil.rmtree(folder)
    assert {"llama", "qwen3_5_text", "gpt_oss", "granite", "deepseek_v2", "olmo3"} <= computed
    assert {"phimoe", "cohere2", "gemma2", "granite-logits_scaling", "inkling_text", "stablelm"} <= refused
    assert len(computed) > 50


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.bias", "model.norm.bias", "lm_head.weight_scale", "model.embed_tokens.weight_scale", "logit_scale",
        "model.norm_2.weight", "model.hc_head.hc_fn", "output_projection.weight",
    ],
)  # fmt: skip
def test_a_tensor_of_the_output_layer_that_is_not_read_is_refused_by_name(target: Path, name):
    replace_tensors(target / "model.safetensors", {name: torch.ones(4)})
    with pytest.raises(ValueError, match=rf"has {re.escape(name)}: .*another target\.path"):
        load_target_spec(str(target))


def test_what_does_not_lead_to_logits_may_lie_beside_them(target: Path):
    names = (
        "mtp.layers.0.norm.weight", "model.mtp_layers.0.norm.weight", "model.layers.9.shared_head.norm.bias",
        "visual.blocks.0.norm1.bias", "model.vision_tower.head.bias", "multi_modal_projector.norm.weight",
        "model.rotary_emb.inv_freq", "language_model.lm_head.weight",
    )  # fmt: skip
    replace_tensors(target / "model.safetensors", {name: torch.ones(4) for name in names})
    edit_config(
        target, output_router_logits=True, attn_logit_softcapping=50.0, num_logits_to_keep=4, lm_head_bias=False
    )
    load_pieces(str(target))


def test_the_first_command_that_sees_weights_names_the_bias(target: Path, tmp_path, capsys):
    command = ("data_gen/prompts.py", f"output_dir={tmp_path / 'out'}", f"target.path={target}", "prompts.max_train=64")
    replace_tensors(target / "model.safetensors", {"model.norm.bias": torch.ones(192)})
    assert run_here(*command) == 1
    assert "model.norm.bias" in capsys.readouterr().err
    (target / "model.safetensors").unlink()  # with config.json alone nobody can know
    assert run_here("data_gen/dry_run.py", *command[1:]) == 0


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
    models, families = Path(transformers.__file__).parent / "models", set()
    for source in models.glob("*/modeling_*.py"):
        text = source.read_text(encoding="utf-8")
        classes = re.split(r"^class ", text, flags=re.MULTILINE)
        centred = {body.split("(")[0] for body in classes if re.search(r"1(\.0)? \+ self\.weight", body)}
        final = set(re.findall(r"self\.(?:final_)?norm = (\w+)\(", text))
        if centred & final and not source.parent.name.startswith("t5"):  # an encoder and a decoder
            assert source.parent.name in CENTRED_NORMS, f"{source.parent.name}: {centred & final}"
            families.add(source.parent.name)
    assert {"gemma", "qwen3_next"} <= families


PLAIN = {"rope_type": "default", "rope_theta": 1e6}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25, "mrope_section": [8, 12, 12]}}, PLAIN),
        ({"rope_parameters": {"sliding_attention": {**PLAIN, "rope_theta": 1e4}, "full_attention": PLAIN}}, PLAIN),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}, "rope_theta": 1e6}, PLAIN),
        ({"rope_scaling": None, "rope_theta": 1e6, "partial_rotary_factor": 0.5}, PLAIN),
        (  # of a checkpoint made before transformers 5
            {"rope_scaling": {"type": "yarn", "factor": 32}, "rope_theta": 150000, "max_position_embeddings": 4096},
            {"rope_type": "yarn", "rope_theta": 150000, "factor": 32.0, "original_max_position_embeddings": 4096},
        ),
    ],
)
def test_a_head_rotates_its_whole_head_dim_as_layers_of_full_attention(config, expected):
    assert head_rope(config, "target") == expected


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}},
            r"rope_type longrope,.* give another target\.path",
        ),
        ({"lm_head_multiplier": 0.04}, r"lm_head_multiplier=0\.04: its logits are not lm_head"),
        ({"dim_model_base": 256}, r"dim_model_base=256"),
        ({"final_logit_softcapping": 30.0}, r"final_logit_softcapping=30\.0"),
        ({"lm_head_bias": True}, r"lm_head_bias=True"),
        ({"logits_mup_width_multiplier": 24.0}, r"logits_mup_width_multiplier=24\.0"),  # of a family not known here
    ],
)
def test_what_is_not_computed_is_refused(target, changes, named):
    edit_config(target, **changes)
    with pytest.raises(ValueError, match=named):
        load_target_spec(str(target))
