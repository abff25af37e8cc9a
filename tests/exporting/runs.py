"""Runs that were never trained: random weights in the form that training writes, and the config of their heads."""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from drafthead import artifacts
from drafthead.config import Recipe
from drafthead.drafters.base import DraftShape, draft_shape
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.vocabulary import choose_vocabulary
from drafthead.exporting.export import write_head
from drafthead.files import write_json
from drafthead.target.pieces import TargetPieces
from drafthead.target.spec import load_target_spec, target_identity
from tests.recipes import SMALL_HEAD, tiny_recipe


def recipe_at(output_dir: Path, *overrides: str) -> Recipe:
    return tiny_recipe(output_dir, *SMALL_HEAD, *overrides)


def shape_of(recipe: Recipe) -> DraftShape:
    return draft_shape(recipe.head, load_target_spec(recipe.target_path), recipe.target.aux_layer_ids)


def config_of(recipe: Recipe) -> dict[str, Any]:
    """config.json of the recipe's head, as vLLM finds it."""
    vllm = drafter_of(recipe.head).vllm
    config = vllm.plain_config(shape_of(recipe), recipe.target.aux_layer_ids, recipe.target.dtype)
    if recipe.export.format == "speculators":
        verifier = {"name_or_path": "org/target", "architectures": ["GptOssForCausalLM"]}
        config = vllm.speculators_config(config, recipe.eval.num_draft_tokens, verifier)
    return json.loads(json.dumps(config))


def random_weights(shape: DraftShape, seed: int = 0) -> dict[str, Tensor]:
    """A head whose norms are not ones and whose sinks are not zeros, so that one left out shows; float32 values that
    bf16 cannot hold."""
    torch.manual_seed(seed)
    weights = drafter_of(shape.head).MODULE(shape).state_dict()
    weights = {n: t * (1 + 0.3 * torch.randn_like(t)) if "norm" in n else t for n, t in weights.items()}
    weights |= {n: torch.randn_like(t) for n, t in weights.items() if "sink" in n}
    counts = torch.rand(shape.vocab_size)
    vocabulary = choose_vocabulary(counts, shape.head.draft_vocab_size, torch.tensor([0]))
    return {**weights, "d2t": vocabulary.d2t, "t2d": vocabulary.t2d}


def write_random_head(recipe: Recipe, weights: dict[str, Tensor] | None = None) -> Path:
    """The two files of a head that has no run; returns their folder."""
    shape = shape_of(recipe)
    write_head(recipe, recipe.head_dir, weights or random_weights(shape), shape, recipe.target.aux_layer_ids)
    return recipe.head_dir


def write_run(recipe: Recipe, weights: dict[str, Tensor] | None = None) -> Path:
    """A finished run with one checkpoint; returns the checkpoint."""
    spec = load_target_spec(recipe.target_path)
    identity = {
        "target": target_identity(recipe, spec),
        "aux_layer_ids": list(recipe.target.aux_layer_ids),
        "head": recipe.head.model_dump(mode="json"),
        "num_draft_tokens": recipe.eval.num_draft_tokens,
    }
    assert not artifacts.begin(recipe.run_dir, "run", identity)
    checkpoint = recipe.run_dir / "checkpoints" / "step_00000007"
    checkpoint.mkdir(parents=True)
    save_file(weights or random_weights(shape_of(recipe)), checkpoint / "model.safetensors")
    write_json(checkpoint / "state.json", {"step": 7, "acceptance_length": 1.5})
    list_files(checkpoint)
    artifacts.finish(recipe.run_dir, {"best_step": 7})
    return checkpoint


def list_files(checkpoint: Path) -> None:
    """The manifest of a checkpoint, of the files that are there now."""
    there = [str(p.relative_to(checkpoint)) for p in sorted(checkpoint.rglob("*")) if p.is_file()]
    names = [name for name in there if name != artifacts.MANIFEST]
    write_json(checkpoint / artifacts.MANIFEST, {"files": artifacts.file_entries(checkpoint, names)})


def bare_copy(head: Path, folder: Path) -> Path:
    """The two files that an engine reads, as a publisher puts them up; returns the new folder."""
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(head / name, folder)
    return folder


# The same head, written otherwise


def float16_of_bf16(tensors: dict[str, Tensor], pieces: TargetPieces) -> None:
    """As early checkpoints are, with a copy of the target's embedding."""
    for name, tensor in tensors.items():
        tensors[name] = tensor.half() if tensor.is_floating_point() else tensor
    tensors["embed_tokens.weight"] = pieces.embed_tokens.half()


def by_frequency(tensors: dict[str, Tensor], _pieces: TargetPieces) -> None:
    order = torch.randperm(len(tensors["d2t"]), generator=torch.Generator().manual_seed(0))
    numbers = torch.arange(len(order))
    tensors["d2t"] = (tensors["d2t"] + numbers)[order] - numbers
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        if name in tensors:
            tensors[name] = tensors[name][order]


def fused(tensors: dict[str, Tensor], _pieces: TargetPieces) -> None:
    for whole, parts in {"self_attn.qkv": ("q", "k", "v"), "mlp.gate_up": ("gate", "up")}.items():
        module, _, name = whole.partition(".")
        rows = [tensors.pop(f"midlayer.{module}.{part}_proj.weight") for part in parts]
        tensors[f"midlayer.{module}.{name}_proj.weight"] = torch.cat(rows)
