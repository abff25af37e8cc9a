"""How a head that is served differs from the one that was trained: what `eval/explain.py` looks at first."""

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from drafthead.artifacts import MANIFEST, read_json, read_manifest
from drafthead.config import Recipe
from drafthead.drafters.base import DraftShape
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.trained import Checkpoint
from drafthead.drafters.vllm import check_config
from drafthead.target.pieces import compute_dtype, load_target_spec, target_names


def head_differences(recipe: Recipe, directory: Path, source: Checkpoint, shape: DraftShape) -> list[str]:
    """How the head that is served differs from the one that was trained; a line for each kind of difference.

    Args:
        recipe: what is served, and how.
        directory: of the served head.
        source: the checkpoint it should come from.
        shape: of the trained head.
    """
    spec = load_target_spec(recipe.target_path, recipe.target.revision)
    differences = source.differences(recipe, spec)
    found = [f"the recipe describes another head than was trained:\n{differences}"] if differences else []
    if (directory / MANIFEST).exists():
        made_for, target = target_names(read_manifest(directory)["identity"]["target"], recipe, spec)
        if made_for != target:
            found.append(f"another target: the head was made for {made_for}, served is {target}")
    try:
        config = read_json(directory / "config.json")
        check_config(config, shape, source.aux_layer_ids, recipe.engine.max_model_len)
    except KeyError as error:
        found.append(f"config.json has no {error}")
    except ValueError as error:
        found.append(str(error))
    dtype = str(compute_dtype(spec, recipe.target.dtype)).removeprefix("torch.")
    files = drafter_of(recipe.head).vllm
    wanted = files.checkpoint_tensors(files.exported_tensors(source.weights(), shape, dtype))
    served = files.checkpoint_tensors(load_file(directory / "model.safetensors"))
    return found + _tensors(served, wanted)


def _tensors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> list[str]:
    """The file's tensors against the checkpoint's in the file's type."""
    lines = [f"model.safetensors has no {name}, which was trained" for name in sorted(wanted.keys() - found.keys())]
    lines += [f"model.safetensors has {name}, which was not trained" for name in sorted(found.keys() - wanted.keys())]
    both = sorted(found.keys() & wanted.keys())
    if "t2d" in both and found["t2d"].shape == wanted["t2d"].shape:
        others = int((found["t2d"].bool() & ~wanted["t2d"].bool()).sum())
        if others:
            lines.append(f"another draft vocabulary: {others} of {int(found['t2d'].sum())} tokens were not trained")
    if changed := [name for name in both if not torch.equal(found[name], wanted[name])]:
        counted = f"{len(changed)} of {len(both)} tensors"
        lines.append(f"other values than in the checkpoint: {', '.join(changed)} ({counted})")
    return lines
