"""Write a trained head as a directory that engines serve, and prove it before it has a name.

Reads the consolidated safetensors of a checkpoint and nothing else: no pickle, no DeepSpeed. Parameter names in the
checkpoint are the exported ones, so the work is a cast, a configuration and the checks: names, shapes and config.json
(contract, served), equal logits from the written file (reload), acceptance in vLLM (serve_check). Files are written
into `.candidate` inside the head's directory and moved out when every check has passed: an engine pointed at a
directory whose export failed or was killed finds no config.json.
"""

import os
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from drafthead import locks, provenance
from drafthead.config import Recipe
from drafthead.drafters.base import DraftShape
from drafthead.drafters.trained import Checkpoint
from drafthead.exporting.card import CARD
from drafthead.exporting.checkpoint import open_checkpoint
from drafthead.exporting.contract import MAPS, check_tensors, exported_tensors, head_config
from drafthead.exporting.fp8_cost import measure_fp8_cost
from drafthead.exporting.lineage import record_prompts, training_cost
from drafthead.exporting.reload import check_reload
from drafthead.exporting.rope import served_shape
from drafthead.exporting.serve_check import check_serving
from drafthead.exporting.served import check_served
from drafthead.exporting.speculators import to_speculators
from drafthead.files import atomic_path, sha256_file, sync, write_json
from drafthead.target.files import local_files
from drafthead.target.pieces import TargetSpec, check_aux_layer_ids, load_target_spec, target_identity

KIND = "head"
_CANDIDATE = ".candidate"


def export_head(recipe: Recipe, checkpoint: Path | None = None, serve_check: bool = True) -> Path:
    """Export a checkpoint of the recipe's run, by default the best one.

    Args:
        recipe: of the run.
        checkpoint: a directory below runs/NAME/checkpoints.
        serve_check: start vLLM with the head and compare its acceptance with the prediction.

    Returns:
        The head's directory.

    Raises:
        ArtefactError: there is no finished run, the checkpoint is damaged, the prompts here are not the run's, or
            there is nothing to check serving on.
        InUseError: another process is exporting to the same directory.
        ValueError: the checkpoint does not fit the recipe, or a check failed; nothing is left to serve then.
    """
    spec = load_target_spec(recipe.target_path, recipe.target.revision)
    source = open_checkpoint(recipe, checkpoint, spec)
    directory = recipe.head_dir
    if provenance.begin(directory, KIND, _identity(recipe, spec, source), alone=True):
        _check_again(recipe, spec, source, serve_check)
        return directory
    candidate = directory / _CANDIDATE
    shutil.rmtree(candidate, ignore_errors=True)  # of a killed export
    try:
        counts = _write_checked(recipe, spec, source, candidate, serve_check)
    except BaseException:
        shutil.rmtree(candidate, ignore_errors=True)
        _unclaim(directory)
        raise
    for path in sorted(candidate.iterdir(), key=lambda file: file.name == "config.json"):
        os.replace(path, directory / path.name)  # the one without which nothing loads comes last
    candidate.rmdir()
    sync(directory)
    _finish(directory, counts)
    print(f"exported {source.path.name} to {directory}")
    return directory


def _identity(recipe: Recipe, spec: TargetSpec, source: Checkpoint) -> dict[str, Any]:
    return {
        "run": source.reference,
        "weights": sha256_file(source.path / "model.safetensors"),
        "checkpoint": source.path.name,
        "step": source.state["step"],
        "predicted_acceptance_length": source.state["acceptance_length"],
        "num_draft_tokens": recipe.eval.num_draft_tokens,
        "target": target_identity(recipe, spec),
        "aux_layer_ids": list(source.aux_layer_ids),
        **({"started_from": source.run["started_from"]} if "started_from" in source.run else {}),
        "export": recipe.export.model_dump(mode="json", exclude={"license"}),  # the licence is on the card only
    }


def _write_checked(
    recipe: Recipe, spec: TargetSpec, source: Checkpoint, candidate: Path, serve_check: bool
) -> dict[str, Any]:
    """Fill the candidate's directory and run the checks on it; what they found goes into the manifest."""
    check_aux_layer_ids(spec, source.aux_layer_ids)
    trained = source.shape(spec)
    shape = served_shape(trained, recipe.export)
    weights = source.weights()
    check_tensors(weights, trained)
    config = _config(recipe, shape, source.aux_layer_ids)
    dtype = recipe.export.dtype
    write_head(candidate, config, exported_tensors(weights, shape, dtype, recipe.export.format))
    record_prompts(recipe, candidate)
    check_served(config, shape, source.aux_layer_ids, recipe.engine.max_model_len, dtype)
    agreement = check_reload(candidate, weights, shape, dtype)
    print(f"reloaded: same logits as the training module; {agreement:.1%} of top drafts survive {dtype}")
    return {
        "parameters": sum(t.numel() for name, t in weights.items() if name not in MAPS),
        "top_draft_agreement": agreement,
        "training": training_cost(source.run_dir),
        **(_judge(recipe, candidate, weights, shape, source) if serve_check else {"serve_check": None}),
    }


def _config(recipe: Recipe, shape: DraftShape, aux_layer_ids: tuple[int, ...]) -> dict[str, Any]:
    plain = head_config(shape, aux_layer_ids, recipe.export.dtype, shape.max_position_embeddings)
    if recipe.export.format == "vllm":
        return plain
    directory = local_files(recipe.target_path, recipe.target.revision, ("config.json",))
    architectures = provenance.read_json(directory / "config.json").get("architectures", [])
    return to_speculators(plain, recipe.target_path, architectures, recipe.eval.num_draft_tokens)


def _judge(
    recipe: Recipe, directory: Path, weights: dict[str, Tensor], shape: DraftShape, source: Checkpoint
) -> dict[str, Any]:
    """What the checks that need validation answers find, for the manifest."""
    found = {}
    if recipe.export.dtype == "fp8":
        cost = measure_fp8_cost(recipe, weights, shape, source.aux_layer_ids)
        print(cost.sentence())
        found["fp8_cost"] = asdict(cost)
    check = check_serving(recipe, directory, weights, shape, source.aux_layer_ids)
    print(check.sentence())
    return {**found, "serve_check": asdict(check)}


def _check_again(recipe: Recipe, spec: TargetSpec, source: Checkpoint, serve_check: bool) -> None:
    """A whole head that was exported without the serving check is checked now; its files stay as they are.

    Raises:
        ArtefactError: they are not the ones that were exported.
    """
    directory = recipe.head_dir
    counts = provenance.require(directory, KIND, "python export/head.py RECIPE", every_byte=True)["counts"]
    if not serve_check or counts.get("serve_check"):
        print(f"{directory} is complete; nothing to do")
        return
    shape = served_shape(source.shape(spec), recipe.export)
    counts |= _judge(recipe, directory, source.weights(), shape, source)
    _finish(directory, counts)


def _finish(directory: Path, counts: dict[str, Any]) -> None:
    """The manifest; the card, which follows what is measured later, is no part of the artefact and is written anew."""
    (directory / CARD).unlink(missing_ok=True)
    provenance.finish(directory, counts)


def write_head(directory: Path, config: dict, tensors: dict[str, Tensor]) -> None:
    """The two files an engine reads, each whole or absent."""
    write_json(directory / "config.json", config)
    with atomic_path(directory / "model.safetensors") as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})


def _unclaim(directory: Path) -> None:
    """Give up a directory in which nothing but the claim was written, so that another recipe may try."""
    locks.let_go(directory)
    left = [path.name for path in directory.iterdir()]
    if left == [provenance.IDENTITY]:
        (directory / provenance.IDENTITY).unlink()
        if not directory.is_symlink():  # somebody's link to another disk stays
            directory.rmdir()
