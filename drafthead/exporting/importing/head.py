"""Bring a public head into `runs/NAME` as if a run had ended with it: to measure, convert, export and train on.

The checkpoint has no DeepSpeed state, so no run resumes from it; `train.init_from` begins one with its weights.
"""

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from drafthead import provenance
from drafthead.config import HeadConfig, Recipe
from drafthead.data.trained_on import read_trained_on, write_trained_on
from drafthead.drafters.base import DraftShape
from drafthead.exporting.contract import check_tensors
from drafthead.exporting.importing.describe import Description, describe
from drafthead.exporting.importing.files import read_public_head
from drafthead.exporting.importing.tensors import completed, renamed
from drafthead.exporting.speculators import from_speculators, is_speculators
from drafthead.files import atomic_path, sha256_file, write_json
from drafthead.target.pieces import TargetSpec, check_aux_layer_ids, load_pieces, load_target_spec, target_identity

KIND = "run"
_CHECKPOINT = "step_00000000"


def import_head(recipe: Recipe, source: str, revision: str | None = None, layer_ids_are: str | None = None) -> Path:
    """Import a head for the recipe's target.

    Args:
        recipe: its head section and aux layer ids must be the head's; the error says which overrides make them so.
        source: directory or hub id.
        revision: of a hub id.
        layer_ids_are: "boundaries" or "blocks" when the ids alone are ambiguous.

    Returns:
        The run's directory.

    Raises:
        ArtefactError: `runs/NAME` holds something else.
        FileNotFoundError: the head has no config.json or no tensors.
        ValueError: pickled tensors, another target, an unknown tensor, or a recipe that describes another head.
    """
    public = read_public_head(source, revision)
    spec = load_target_spec(recipe.target_path, recipe.target.revision)
    plain = from_speculators(public.config) if is_speculators(public.config) else public.config
    named = renamed(public.tensors)
    if "fc.weight" not in named:
        raise ValueError(f"{public.directory} has no fc.weight: not an EAGLE-3 head ({sorted(named)[:3]} ...)")
    found = describe(plain, named, spec, layer_ids_are)
    check_aux_layer_ids(spec, found.aux_layer_ids)
    _check_recipe(recipe, found)
    pieces = load_pieces(recipe.target_path, recipe.target.revision)
    tensors = completed(named, found.head.draft_vocab_size, pieces)
    check_tensors(tensors, _shape(found, spec))
    files = {p.name: sha256_file(p) for p in sorted(public.directory.glob("*.safetensors"))}
    identity = _identity(recipe, spec, found, {"path": source, "revision": revision, "files": files})
    if provenance.begin(recipe.run_dir, KIND, identity, thinned=True, alone=True):
        print(f"{recipe.run_dir} is complete; nothing to do")
        return recipe.run_dir
    checkpoint = recipe.run_dir / "checkpoints" / _CHECKPOINT
    with atomic_path(checkpoint / "model.safetensors") as temporary:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temporary)
    write_json(checkpoint / "state.json", _STATE)
    _keep_prompts(public.directory, recipe.run_dir)
    entries = {
        name: {"bytes": (checkpoint / name).stat().st_size, "sha256": sha256_file(checkpoint / name)}
        for name in ("model.safetensors", "state.json")
    }
    write_json(checkpoint / provenance.MANIFEST, {"files": entries})
    provenance.finish(recipe.run_dir, {"best_step": 0, "imported": True})
    print(f"imported {source} to {recipe.run_dir}")
    return recipe.run_dir


# As training.checkpoint.TrainState writes it; nothing was trained or measured here.
_STATE: dict[str, Any] = {
    "step": 0, "world_size": 1, "zero_stage": 0, "acceptance_length": None, "best_step": 0,
    "best_acceptance_length": None, "acceptance_per_position": [],
}  # fmt: skip


def _shape(found: Description, spec: TargetSpec) -> DraftShape:
    return DraftShape(
        found.head, spec.hidden_size, spec.vocab_size, len(found.aux_layer_ids), found.rms_norm_eps,
        found.rope_parameters, found.max_position_embeddings,
    )  # fmt: skip


def _identity(recipe: Recipe, spec: TargetSpec, found: Description, source: dict[str, Any]) -> dict[str, Any]:
    return {
        "imported": source,
        "target": target_identity(recipe, spec),
        "aux_layer_ids": list(found.aux_layer_ids),
        "head": found.head.model_dump(mode="json"),
        # A head trained here rotates and norms as its target does, a public one as its own config says.
        "rope_parameters": found.rope_parameters,
        "rms_norm_eps": found.rms_norm_eps,
        "num_draft_tokens": recipe.eval.num_draft_tokens,
    }


def _keep_prompts(head: Path, run_dir: Path) -> None:
    """A head that was exported here says which prompts it was made from."""
    if (head / provenance.MANIFEST).is_file():
        known = read_trained_on(head, provenance.read_manifest(head))
        if known is not None:
            write_trained_on(run_dir, None, known)


def _check_recipe(recipe: Recipe, found: Description) -> None:
    overrides = [
        f"head.{name}={str(value).lower()}"
        for name, value in found.head.model_dump().items()
        if getattr(recipe.head, name) != value and name in HeadConfig.model_fields
    ]
    if recipe.target.aux_layer_ids != found.aux_layer_ids:
        overrides.append(f"target.aux_layer_ids={list(found.aux_layer_ids)}".replace(" ", ""))
    if overrides:
        raise ValueError(
            "the recipe describes another head than this one; put these into the recipe, or add to this command and "
            "to those that follow:\n  " + " ".join(overrides)
        )
