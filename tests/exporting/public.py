"""Heads laid out as their publishers lay them out, with random weights. Written from configs seen in public.

No public head could be downloaded where these tests were written: names and keys are right to the best of our
knowledge, and nothing more.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafthead.config import Recipe
from drafthead.target.pieces import load_pieces
from tests.exporting.runs import config_of
from tests.recipes import changed

_SWITCHES = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def published(layout: str, directory: Path, recipe: Recipe, weights: dict[str, Tensor]) -> Path:
    """Write the recipe's head as `layout` has it.

    nvidia       top-level and nested aux layer ids, every norm switch named
    lmsys        nested aux layer ids as blocks counted from 0, an embedding that is the target's, t2d
    redhat       speculators: layers.0, defaults left out, copies of the target beside the head
    nebius       `model.` before every name, aux layer ids at the top level only
    yuhuili      no aux layer ids, no switches, no t2d, no head_dim: the oldest
    tied         the whole vocabulary, lm_head left to the target
    """
    tensors = {n: t.bfloat16() if t.is_floating_point() else t for n, t in weights.items()}
    config, tensors = _as_published(layout, config_of(recipe), tensors, recipe)
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, directory / "model.safetensors")
    return directory


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
        config = config_of(changed(recipe, "export", format="speculators"))
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
    if layout == "tied":
        config = _without(plain, "draft_vocab_size") | {"tie_word_embeddings": True}
        return config, _without(tensors, "lm_head.weight", "d2t", "t2d")
    return plain, tensors


def head_of(recipe: Recipe, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights as they come back from a bf16 file."""
    return {n: t.to(torch.bfloat16).float() if t.is_floating_point() else t for n, t in weights.items()}
