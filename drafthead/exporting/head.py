"""Write a trained head as a directory that vLLM serves.

Reads the consolidated safetensors of a checkpoint and nothing else: no pickle, no DeepSpeed. Parameter
names in the checkpoint are the exported ones, so the work is a cast, a configuration and the checks.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead import provenance
from drafthead.config import Recipe
from drafthead.exporting.contract import check_tensors, head_config
from drafthead.models.draft import draft_shape
from drafthead.models.target import load_target_spec, target_identity

KIND = "head"
_MAPS = ("d2t", "t2d")
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def export_head(recipe: Recipe, checkpoint: Path | None = None) -> Path:
    """Export a checkpoint of the recipe's run, by default the best one.

    Args:
        recipe: of the run.
        checkpoint: a directory below runs/NAME/checkpoints.

    Returns:
        The head's directory.

    Raises:
        ArtefactError: there is no finished run, or the checkpoint is damaged.
        ValueError: the checkpoint's tensors do not fit the recipe.
    """
    run = _finished_run(recipe, checkpoint)
    source = checkpoint or recipe.run_dir / "checkpoints" / f"step_{run['counts']['best_step']:08d}"
    state = _verified_state(source)
    spec = load_target_spec(recipe.target_path, recipe.target.revision, recipe.target.trust_remote_code)
    identity = {
        "run": provenance.reference(run) if run else None,
        "weights": provenance.sha256_file(source / "model.safetensors"),
        "checkpoint": source.name,
        "step": state["step"],
        "predicted_acceptance_length": state["acceptance_length"],
        "num_draft_tokens": recipe.eval.num_draft_tokens,
        "target": target_identity(recipe, spec),
        "tap_ids": list(recipe.target.tap_ids),
        "export": recipe.export.model_dump(mode="json"),
    }
    if provenance.begin(recipe.head_dir, KIND, identity):
        print(f"{recipe.head_dir} is complete; nothing to do")
        return recipe.head_dir
    tensors = load_file(source / "model.safetensors")
    head = recipe.head.sized(len(tensors["d2t"]))
    shape = draft_shape(recipe.model_copy(update={"head": head}), spec)
    check_tensors(tensors, shape)
    config = head_config(
        shape, recipe.target.tap_ids, recipe.export.dtype,
        recipe.export.max_position_embeddings or spec.max_position_embeddings,
    )  # fmt: skip
    _write(recipe.head_dir, config, _cast(tensors, _DTYPES[recipe.export.dtype]))
    provenance.finish(recipe.head_dir, {"parameters": sum(t.numel() for n, t in tensors.items() if n not in _MAPS)})
    print(f"exported {source.name} to {recipe.head_dir}")
    return recipe.head_dir


def _finished_run(recipe: Recipe, checkpoint: Path | None) -> dict[str, Any]:
    """Manifest of the run; an explicit checkpoint may come from a run that is still going."""
    if checkpoint is not None and not (recipe.run_dir / provenance.MANIFEST).exists():
        return {}
    return provenance.require(recipe.run_dir, "run", "accelerate launch train/eagle3.py RECIPE")


def _verified_state(source: Path) -> dict[str, Any]:
    if not (source / provenance.MANIFEST).is_file():
        known = ", ".join(sorted(p.name for p in source.parent.glob("step_*"))) or "none"
        raise provenance.ArtefactError(f"{source} is not a checkpoint; {source.parent} has: {known}")
    broken = provenance.verify_files(source)
    if broken:
        raise provenance.ArtefactError(f"{source} is damaged ({', '.join(broken)}); export another checkpoint")
    return provenance.read_json(source / "state.json")


def _cast(tensors: dict[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: tensor.to(dtype) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def _write(directory: Path, config: dict, tensors: dict[str, Tensor]) -> None:
    """Fill the head's directory; files of an interrupted export are overwritten whole."""
    provenance.write_json(directory / "config.json", config)
    with provenance.atomic_path(directory / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
