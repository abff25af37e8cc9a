"""Write a trained head as a directory that engines serve, and check it before it has a name.

Reads the consolidated safetensors of a checkpoint and nothing else: no pickle, no DeepSpeed. Parameter names in the
checkpoint are the exported ones, so the work is a cast, a configuration and the checks: names, shapes and config.json
(the drafter's vllm module) and acceptance in vLLM (check). Files are written into
`.candidate` inside the head's directory and moved out when every check has passed: an engine pointed at a directory
whose export failed or was killed finds no config.json.
"""

import logging
import os
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from drafthead import artifacts
from drafthead.artifacts import read_json
from drafthead.config import Recipe
from drafthead.data.prompts import noted_prompts, write_trained_on
from drafthead.drafters.base import DraftShape, num_parameters
from drafthead.drafters.registry import drafter_of
from drafthead.drafters.trained import MODEL_FILE, Checkpoint, best_checkpoint, read_checkpoint
from drafthead.drafters.vllm import check_config, check_tensors
from drafthead.engine.offline import on_cpu
from drafthead.exporting.card import CARD
from drafthead.exporting.check import check_serving
from drafthead.files import atomic_path, sha256_file, sync, write_json
from drafthead.target.files import local_files
from drafthead.target.pieces import compute_dtype
from drafthead.target.spec import TargetSpec, recipe_spec, target_identity

KIND = "head"
_CANDIDATE = ".candidate"
log = logging.getLogger(__name__)


def export_head(recipe: Recipe, checkpoint: Path | None = None, serve_check: bool = True) -> Path:
    """Export a checkpoint of the recipe's run, by default the best one.

    Args:
        recipe: recipe of the run.
        checkpoint: a directory below runs/NAME/checkpoints.
        serve_check: start vLLM with the head and compare its acceptance with the prediction.

    Returns:
        The head's directory.

    Raises:
        ArtifactError: there is no finished run, the checkpoint is damaged, there is nothing to check serving on, or the
            files of an exported head have changed.
        InUseError: another process is exporting to the same directory.
        ValueError: the checkpoint does not fit the recipe, or a check failed; nothing is left to serve then.
    """
    files = drafter_of(recipe.head).vllm
    if serve_check and files.GPU_ONLY and on_cpu():
        log.info(
            f"vLLM serves {files.ALGORITHM} heads on GPUs only: its acceptance is not compared with the prediction"
        )
        serve_check = False
    spec = recipe_spec(recipe)
    source = open_checkpoint(recipe, checkpoint, spec)
    directory, shape = recipe.head_dir, source.shape(spec)
    if artifacts.begin(directory, KIND, _identity(recipe, spec, source), alone=True):
        counts = artifacts.require(directory, KIND, "python export/head.py RECIPE", every_byte=True)["counts"]
        if serve_check and not counts.get("serve_check"):  # checked now; the files stay as they are
            _finish(directory, counts | {"serve_check": check_serving(recipe, directory, source, shape)})
        else:
            log.info(f"{directory} is complete; nothing to do")
        return directory
    candidate = directory / _CANDIDATE
    shutil.rmtree(candidate, ignore_errors=True)  # of a killed export
    try:
        weights = source.weights()
        check_tensors(weights, shape)
        config = write_head(recipe, candidate, weights, shape, source.aux_layer_ids)
        if (known := noted_prompts(source.run_dir)) is not None:
            write_trained_on(candidate, known)
        else:
            log.info(f"{source.run_dir} does not say which prompts it learned from, so neither will the head")
        check_config(config, shape, source.aux_layer_ids, recipe.engine.max_model_len)
        serving = check_serving(recipe, candidate, source, shape) if serve_check else None
    except BaseException:
        shutil.rmtree(candidate, ignore_errors=True)
        artifacts.unclaim(directory)
        raise
    for path in sorted(candidate.iterdir(), key=lambda file: file.name == "config.json"):
        os.replace(path, directory / path.name)  # the one without which nothing loads comes last
    candidate.rmdir()
    sync(directory)
    counts = {"parameters": num_parameters(shape), "predicted_on": _predicted_on(source)}
    _finish(directory, counts | {"serve_check": serving})
    log.info(f"exported {source.path.name} to {directory}")
    return directory


def open_checkpoint(recipe: Recipe, path: Path | None, spec: TargetSpec) -> Checkpoint:
    """The run's best checkpoint, or the one at `path`, which may come from a run that is still going.

    The recipe must describe the head that it holds: a switch such as norm_before_residual changes no tensor's shape,
    only what the head computes.

    Raises:
        ArtifactError: there is no finished run, the checkpoint is damaged, or it does not lie in its run.
        ValueError: it is of another run, or the run trained another head than the recipe describes; the message names
            every difference.
    """
    source = read_checkpoint(best_checkpoint(recipe.run_dir) if path is None else path)
    if source.run_dir != recipe.run_dir.resolve():
        raise ValueError(
            f"{source.path} is of another run than {recipe.run_dir}, the recipe's; "
            f"give the recipe of that run (name={source.run_dir.name})"
        )
    if differences := source.differences(recipe, spec):
        raise ValueError(
            f"the recipe describes another head than {source.run_dir} trained:\n{differences}\n"
            "restore these keys of the recipe: the weights only work as they were trained"
        )
    return source


def write_head(
    recipe: Recipe, directory: Path, weights: dict[str, Tensor], shape: DraftShape, aux_layer_ids: tuple[int, ...]
) -> dict[str, Any]:
    """Write the two files that an engine reads, each whole or absent; returns config.json.

    Weights are rounded to the dtype that the target computes in: vLLM runs its draft in no other.

    Args:
        recipe: recipe; its export and target sections and K are read.
        directory: directory to write into.
        weights: float32 parameters with d2t and t2d.
        shape: shape of the head as it is served.
        aux_layer_ids: boundaries of the target that the head was trained on.
    """
    files, layout = drafter_of(shape.head).vllm, recipe.export.format
    spec = recipe_spec(recipe)
    dtype = str(compute_dtype(spec, recipe.target.dtype)).removeprefix("torch.")
    config = files.plain_config(shape, aux_layer_ids, dtype)
    if layout == "speculators":
        target = read_json(local_files(recipe.target_path, recipe.target.revision, ("config.json",)) / "config.json")
        verifier = {"name_or_path": recipe.target_path, "architectures": target.get("architectures", [])}
        config = files.speculators_config(config, recipe.eval.num_draft_tokens, verifier)
    write_json(directory / "config.json", config)
    with atomic_path(directory / "model.safetensors") as temporary:
        tensors = files.exported_tensors(weights, shape, dtype, layout)
        save_file(tensors, temporary, metadata={"format": "pt"})
    return config


def _identity(recipe: Recipe, spec: TargetSpec, source: Checkpoint) -> dict[str, Any]:
    return {
        "run": source.reference,
        "weights": sha256_file(source.path / MODEL_FILE),
        "checkpoint": source.path.name,
        "step": source.state["step"],
        "predicted_acceptance_length": source.state["acceptance_length"],
        "num_draft_tokens": recipe.eval.num_draft_tokens,
        "target": target_identity(recipe, spec),
        "aux_layer_ids": list(source.aux_layer_ids),
        **({"started_from": source.run["started_from"]} if "started_from" in source.run else {}),
        "export": recipe.export.model_dump(mode="json", exclude={"license"}),  # the licence is on the card only
    }


def _finish(directory: Path, counts: dict[str, Any]) -> None:
    """The manifest; the card, which follows what is measured later, is no part of the artifact and is written anew."""
    (directory / CARD).unlink(missing_ok=True)
    artifacts.finish(directory, counts)


def _predicted_on(source: Checkpoint) -> dict[str, Any] | None:
    """Responses that acceptance was predicted on, whether all of them loop, and how many tokens of each were replayed;
    None for a head that was imported."""
    record = {key: source.state.get(key) for key in ("prompts", "looping")}
    return {**record, "tokens": source.run["max_tokens"]} if record["prompts"] else None
