"""Import of public heads: every layout gives the weights that went in, and what cannot be read is refused."""

import json
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead.artifacts import read_json, verify_files
from drafthead.config import Recipe
from drafthead.exporting.card import write_card
from drafthead.exporting.export import export_head
from drafthead.exporting.importing import import_head
from drafthead.target.pieces import TargetPieces, load_pieces
from tests.damage import edit_config, replace_tensors
from tests.exporting.runs import (
    by_frequency,
    config_of,
    float16_of_bf16,
    fused,
    random_weights,
    recipe_at,
    shape_of,
    write_random_head,
    write_run,
)
from tests.scripts import run_here

_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def published(layout: str, directory: Path, recipe: Recipe, weights: dict[str, Tensor]) -> Path:
    """Write the recipe's head as `layout` has it.

    lmsys        nested aux layer ids as blocks counted from 0, an embedding that is the target's, t2d
    redhat       speculators: layers.0, defaults left out, copies of the target beside the head
    nebius       `model.` before every name, aux layer ids at the top level only
    yuhuili      no aux layer ids, no switches, no t2d, no head_dim: the oldest
    tied         the whole vocabulary, lm_head left to the target
    """
    config, tensors = _as_published(layout, config_of(recipe), bf16(weights), recipe)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, directory / "model.safetensors")
    return directory


def bf16(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.bfloat16() if t.is_floating_point() else t for name, t in weights.items()}


def _without(plain: dict[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in plain.items() if key not in names}


def _as_published(
    layout: str, plain: dict[str, Any], tensors: dict[str, Tensor], recipe: Recipe
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    pieces = load_pieces(recipe.target_path)
    if layout == "lmsys":
        blocks = [layer_id - 1 for layer_id in plain[_LAYER_IDS]]
        config = _without(plain, _LAYER_IDS, "num_aux_hidden_states", *_SWITCHES)
        config["eagle_config"] = {_LAYER_IDS: blocks, "use_aux_hidden_state": True}
        return config, {**tensors, "embed_tokens.weight": pieces.embed_tokens}
    if layout == "redhat":
        config = config_of(recipe.changed("export", format="speculators"))
        config = _without(config, "norm_before_residual", "fc_norm", "norm_output", "target_hidden_size")
        layer = _without(config["transformer_layer_config"], "eagle_config", "num_aux_hidden_states")
        named = {name.replace("midlayer.", "layers.0."): t for name, t in tensors.items()}
        copies = {"verifier_lm_head.weight": pieces.lm_head, "verifier_norm.weight": pieces.final_norm}
        return {**config, "transformer_layer_config": layer}, {**named, **copies}
    if layout == "nebius":
        return _without(plain, "eagle_config"), {f"model.{name}": t for name, t in tensors.items()}
    if layout == "yuhuili":
        config = _without(plain, _LAYER_IDS, "eagle_config", "num_aux_hidden_states", "target_hidden_size", *_SWITCHES)
        rope = config.pop("rope_parameters")
        config |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {"type": rope.pop("rope_type"), **rope}}
        return config, _without(tensors, "t2d")
    config = _without(plain, "draft_vocab_size") | {"tie_word_embeddings": True}
    return config, _without(tensors, "lm_head.weight", "d2t", "t2d")


PLAIN = (
    "head.norm_before_fc=false",
    "target.aux_layer_ids=[2,4,5]",
)  # the tiny target's default aux layers: 2, L/2, L - 3
LAYOUTS = {
    "lmsys": PLAIN,
    "redhat": ("head.norm_before_residual=true",),
    "nebius": ("target.aux_layer_ids=[4,8]",),
    "yuhuili": (*PLAIN, "head.head_dim=96"),
    "tied": ("head.draft_vocab_size=3072",),
}
CHECKPOINT = "checkpoints/step_00000000"


@pytest.fixture
def public(tmp_path):
    """A recipe and the head that it describes."""
    recipe = recipe_at(tmp_path, *PLAIN)
    return recipe, write_random_head(recipe)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_weights_that_went_in(tmp_path, layout):
    recipe, blocks = recipe_at(tmp_path, *LAYOUTS[layout]), None
    weights = random_weights(shape_of(recipe))
    if layout == "tied":
        weights["lm_head.weight"] = load_pieces(recipe.target_path).lm_head.float()
    source = published(layout, tmp_path / "public", recipe, weights)
    if layout == "lmsys":
        blocks = "blocks"
        with pytest.raises(ValueError, match=r"\[1, 3, 4\] .* \[2, 4, 5\].*--layer-ids-are blocks"):
            import_head(recipe, str(source))
    run = import_head(recipe, str(source), layer_ids_are=blocks)
    imported, expected = load_file(run / CHECKPOINT / "model.safetensors"), bf16(weights)
    assert imported.keys() == expected.keys()
    assert all(torch.equal(imported[name], expected[name].to(imported[name].dtype)) for name in expected)
    assert not verify_files(run / CHECKPOINT)
    assert read_json(run / "identity.json")["aux_layer_ids"] == list(recipe.target.aux_layer_ids)
    assert import_head(recipe, str(source), layer_ids_are=blocks) == run


def as_ids(tensors: dict[str, Tensor], _pieces: TargetPieces) -> None:
    """Which t2d proves."""
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))


def as_ids_without_t2d(tensors: dict[str, Tensor], pieces: TargetPieces) -> None:
    """Which the offsets prove that they would be: beyond the vocabulary."""
    as_ids(tensors, pieces)
    tensors["lm_head.weight"], tensors["d2t"] = tensors["lm_head.weight"].flip(0), tensors["d2t"].flip(0)
    del tensors["t2d"]


def in_other_types(tensors: dict[str, Tensor], _pieces: TargetPieces) -> None:
    tensors["d2t"], tensors["t2d"] = tensors["d2t"].float(), tensors["t2d"].int()


def with_what_vllm_passes_over(tensors: dict[str, Tensor], _pieces: TargetPieces) -> None:
    names = "midlayer.self_attn.rotary_emb.inv_freq", "input_norm.weight", "mask_hidden", "layers.1.hidden_norm.weight"
    tensors |= {name: torch.ones(4) for name in names}


@pytest.mark.parametrize(
    "written",
    [
        float16_of_bf16, by_frequency, as_ids, as_ids_without_t2d, in_other_types, fused, with_what_vllm_passes_over,
    ],
)  # fmt: skip
def test_the_same_head_written_otherwise_is_the_same_head(public, written, caplog):
    recipe, source = public
    file = source / "model.safetensors"
    expected = load_file(file)
    tensors = dict(expected)
    written(tensors, load_pieces(recipe.target_path))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    imported = load_file(import_head(recipe, str(source)) / CHECKPOINT / "model.safetensors")
    assert imported.keys() == expected.keys()
    if written is float16_of_bf16:
        expected = {name: t.half() if t.is_floating_point() else t for name, t in expected.items()}
    assert all(torch.equal(imported[name], expected[name].to(imported[name].dtype)) for name in expected)
    assert ("holds ids" in caplog.text) == written.__name__.startswith("as_ids")


def test_rows_of_every_map_follow_the_order_of_the_vocabulary(tmp_path):
    recipe = recipe_at(tmp_path, "head.type=dspark", *BLOCKS)
    source = write_random_head(recipe)
    expected = load_file(source / "model.safetensors")
    tensors = dict(expected)
    by_frequency(tensors, load_pieces(recipe.target_path))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, source / "model.safetensors")
    imported = load_file(import_head(recipe, str(source)) / CHECKPOINT / "model.safetensors")
    assert all(torch.equal(imported[name], expected[name].to(imported[name].dtype)) for name in expected)


def test_an_embedding_is_the_targets_up_to_rounding_and_no_further(public):
    recipe, source = public
    embedding = load_pieces(recipe.target_path).embed_tokens.float()
    trained = embedding.clone()
    trained[7] *= 1.02
    replace_tensors(source / "model.safetensors", {"embed_tokens.weight": trained.half()})
    with pytest.raises(ValueError, match=r"embedding of its own.* eval\.methods"):
        import_head(recipe, str(source))
    replace_tensors(source / "model.safetensors", {"embed_tokens.weight": embedding})
    import_head(recipe, str(source))


DEEP = ("head.fc_norm=true", "head.norm_output=true", "head.num_layers=2", "target.aux_layer_ids=[1,3,6,8]")
BLOCKS = (
    "head.mask_token_id=9", "head.num_draft_positions=4", "head.num_layers=2", "head.sliding_window=32",
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("eagle3", DEEP),
        ("eagle3", (*DEEP, "export.format=speculators")),
        ("peagle", BLOCKS),
        ("dflash", BLOCKS),
        ("dflash", (*BLOCKS, "head.causal=false", "head.attention_sinks=true")),
        ("dspark", BLOCKS),
    ],
)
def test_export_import_export_gives_equal_files_and_no_type_is_taken_for_another(tmp_path, kind, options):
    first, second = (recipe_at(tmp_path / name, f"head.type={kind}", *options) for name in ("first", "second"))
    dtype = getattr(torch, first.target.dtype)
    weights = random_weights(shape_of(first))
    write_run(first, weights)
    exported = export_head(first, serve_check=False)
    imported = load_file(import_head(second, str(exported)) / CHECKPOINT / "model.safetensors")
    assert imported.keys() == weights.keys()
    assert all(torch.equal(imported[name].to(dtype), weights[name].to(dtype)) for name in weights)
    again = export_head(second, serve_check=False)
    for name in ("model.safetensors", "config.json"):
        assert (exported / name).read_bytes() == (again / name).read_bytes()
    other = "dspark" if kind == "dflash" else "dflash"
    with pytest.raises(ValueError, match=rf"{kind}.*head\.type"):
        import_head(recipe_at(tmp_path / "third", f"head.type={other}", *BLOCKS), str(exported))


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (("head.num_layers=2",), "head.num_layers=1 head.norm_before_fc=false target.aux_layer_ids=[2,4,5]"),
        ((*PLAIN, "head.coverage=0.9", "head.draft_vocab_size=0"), "head.draft_vocab_size=256 head.coverage=null"),
    ],
)
def test_a_recipe_of_another_head_is_told_the_overrides(public, tmp_path, other, told):
    _, source = public
    recipe = recipe_at(tmp_path, *other)
    with pytest.raises(ValueError, match=re.escape(told)):
        import_head(recipe, str(source))
    assert not recipe.run_dir.exists()
    import_head(recipe_at(tmp_path, *other, *told.split()), str(source))


def test_a_window_that_the_recipe_sets_is_served_and_none_is_lost(tmp_path, caplog):
    """A head trained on all tokens gets one by its import; a head that has one keeps it."""
    plain = recipe_at(tmp_path / "plain")
    source = write_random_head(plain)
    windowed = recipe_at(tmp_path / "windowed", "head.sliding_window=32")
    with caplog.at_level("INFO", logger="drafthead"):
        import_head(windowed, str(source))
    assert "the head attends to 32 tokens instead of all, as the recipe says" in caplog.text
    exported = export_head(windowed, serve_check=False)
    assert (exported / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    before, after = (read_json(path / "config.json") for path in (source, exported))
    assert before["sliding_window"] is None
    assert after["sliding_window"] == 32
    assert set(after["layer_types"]) == {"sliding_attention"}
    with pytest.raises(ValueError, match=r"head\.sliding_window=32$"):
        import_head(recipe_at(tmp_path / "third"), str(exported))
    wider = recipe_at(tmp_path / "wider", "head.sliding_window=64")
    import_head(wider, str(exported))
    assert read_json(export_head(wider, serve_check=False) / "config.json")["sliding_window"] == 64
    assert "It attends to 64 tokens since then, and to 32 before." in write_card(wider, None).read_text()
    assert "and to all before." in write_card(windowed, None).read_text()


def test_of_a_head_on_the_hub_every_file_is_fetched(public, hub_cache, monkeypatch):
    recipe, source = public
    tensors = load_file(source / "model.safetensors")
    files = {name: f"model-0000{1 + (name == 'fc.weight')}-of-00002.safetensors" for name in tensors}
    for file in set(files.values()):
        save_file({name: tensor for name, tensor in tensors.items() if files[name] == file}, source / file)
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    def fetch(_id: str, revision: str | None, allow_patterns: list[str]) -> str:
        hub_cache.mkdir(exist_ok=True)
        for name in set(allow_patterns) & {path.name for path in source.iterdir()}:
            shutil.copy(source / name, hub_cache)
        return str(hub_cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetch)
    imported = load_file(import_head(recipe, "someone/head") / CHECKPOINT / "model.safetensors")
    assert torch.equal(imported["fc.weight"], tensors["fc.weight"].float())


def other_tensor(name, value):
    return lambda source: replace_tensors(source / "model.safetensors", {name: value})


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda s: (s / "mask_embedding.pt").touch(), "mask_embedding.pt .*eval.methods with `head: {}`"),
        (lambda s: (s / "model.safetensors").rename(s / "pytorch_model.bin"), "pytorch_model.bin is a pickle"),
        (other_tensor("embed_tokens.weight", torch.ones(3072, 192)), "embedding"),
        (other_tensor("midlayer.self_attn.q_norm.weight", torch.ones(32)), "q_norm.weight"),
        (other_tensor("d2t", torch.arange(256) * 12 + 3000), "d2t .* 3072"),
        (other_tensor("d2t", torch.full((256,), 1000.0).bfloat16()), "d2t .*torch.bfloat16, .*; fetch the head again"),
        (other_tensor("d2t", -torch.arange(256)), "d2t .*token 0 from several draft ids"),
        (other_tensor("fc_norm.0.weight", torch.ones(192)), "fc_norm.0.weight"),
        (partial(edit_config, eagle_config={"use_aux_hidden_state": False}), "use_aux_hidden_state=False"),
        (other_tensor("fc.weight", torch.ones(192, 192)), r"\[2, 4, 5\], but fc reads 1"),
        (partial(edit_config, hidden_size=256), "hidden_size=256; .* 192"),
        (partial(edit_config, attention_bias=True), "attention_bias=True"),
        (partial(edit_config, rope_parameters={"partial_rotary_factor": 0.5}), "with partial_rotary_factor=0.5,.*eval"),
        (partial(edit_config, partial_rotary_factor=0.5), "yarn with partial_rotary_factor=0.5,.*eval.methods"),
        (partial(edit_config, rope_parameters={"rope_type": "longrope"}), "rope_type longrope,.*eval.methods"),
        (partial(edit_config, num_attention_heads=None), "no key 'num_attention_heads'"),
    ],
)
def test_what_cannot_be_represented_is_refused(public, damage, message):
    recipe, source = public
    damage(source)
    with pytest.raises(ValueError, match=message.format(source)):
        import_head(recipe, str(source))
    assert not recipe.run_dir.exists()


@pytest.mark.parametrize("head", ["heads/typo", "/nowhere/typo", "typo", "."])
def test_a_head_that_is_not_there_is_named_as_one(head, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_here("export/import_head.py", f"output_dir={tmp_path}", "--head", head) == 1
    stderr = capsys.readouterr().err
    assert head in stderr
    assert "config.json" in stderr
    assert "target" not in stderr
