"""Bring a public head into `runs/NAME` as if a run had ended with it: to measure, convert, export and train on.

Only safetensors and JSON are read. The checkpoint has no DeepSpeed state, so no run resumes from it;
`train.init_from` begins one with its weights.
"""

import json
import logging
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from drafthead import artifacts
from drafthead.config import Recipe
from drafthead.data.prompts import read_trained_on, write_trained_on
from drafthead.drafters.config import HeadConfig
from drafthead.drafters.registry import drafter_of, drafters
from drafthead.drafters.trained import MODEL_FILE, OWN, RUN, STATE_FILE, checkpoint_dir
from drafthead.drafters.vllm import check_tensor_files, check_tensors, completed
from drafthead.files import atomic_path, reading_external, sha256_file, write_json
from drafthead.target.files import INDEX, local_files, read_index
from drafthead.target.pieces import load_pieces
from drafthead.target.spec import check_aux_layer_ids, load_target_spec, target_identity

_STATE = {"step": 0, "acceptance_length": None}  # what export and train.init_from read; nothing was trained here
_HEAD = "the head"  # in messages of what else reads the files of targets
_MASK = "mask_embedding.pt"  # vLLM reads it in place of the mask token's row
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_ANOTHER = "Fetch the head again, or give one of head.type for this target"
_AS_IT_IS = "Give one of head.type for this target, or measure this one as it is, as a method of eval.methods"
log = logging.getLogger(__name__)


def import_head(recipe: Recipe, source: str, revision: str | None = None, layer_ids_are: str | None = None) -> Path:
    """Import a head for the recipe's target.

    Args:
        recipe: recipe whose head section and aux layer ids are the head's; else the error names the overrides to give.
        source: directory or hub id of the public head.
        revision: git revision of a hub id; None: the default branch.
        layer_ids_are: "boundaries" or "blocks" when the ids alone are ambiguous.

    Returns:
        The run's directory.

    Raises:
        ArtifactError: `runs/NAME` holds something else.
        FileNotFoundError: the head has no config.json or no tensors.
        ValueError: pickled tensors, another target, an unknown tensor, or a recipe that describes another head.
    """
    public, config, tensors = read_public_head(source, revision)
    spec = load_target_spec(recipe.target_path, recipe.target.revision)
    files = drafter_of(recipe.head).vllm
    _check_type(recipe.head, config)
    with reading_external(public, _ANOTHER, unsupported=_AS_IT_IS):
        named = files.checkpoint_tensors(tensors)
        shape, aux_layer_ids = files.describe(config, named, spec, layer_ids_are)
        check_aux_layer_ids(spec, aux_layer_ids)
        # A head trained here rotates and norms as its target does, a public one as its own config says.
        head_values = {key: getattr(shape, key) for key in OWN}
        json.dumps(head_values, ensure_ascii=False, allow_nan=False).encode()  # as it will be written
    _check_recipe(recipe, shape.head, aux_layer_ids)
    trained = shape.head.sliding_window
    window = {} if recipe.head.sliding_window == trained else {"trained_window": trained}
    pieces = load_pieces(recipe.target_path, recipe.target.revision)
    with reading_external(public, _ANOTHER, unsupported=_AS_IT_IS):
        weights = completed(named, shape, pieces)
        check_tensors(weights, shape)
    published = {path.name: sha256_file(path) for path in sorted(public.glob("*.safetensors"))}
    identity = {
        "imported": {"path": source, "revision": revision, "files": published, **window},
        "target": target_identity(recipe, spec),
        "aux_layer_ids": list(aux_layer_ids),
        "head": recipe.head.model_dump(mode="json"),
        **head_values,
        "num_draft_tokens": recipe.eval.num_draft_tokens,
    }
    if artifacts.begin(recipe.run_dir, RUN, identity, thinned=True, alone=True):
        log.info(f"{recipe.run_dir} is complete; nothing to do")
        return recipe.run_dir
    checkpoint = checkpoint_dir(recipe.run_dir, 0)
    with atomic_path(checkpoint / MODEL_FILE) as temporary:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, temporary)
    write_json(checkpoint / STATE_FILE, _STATE)
    entries = artifacts.file_entries(checkpoint, [MODEL_FILE, STATE_FILE])
    write_json(checkpoint / artifacts.MANIFEST, {"files": entries})
    if (public / artifacts.MANIFEST).is_file():  # a head that was exported here states which prompts it was made from
        known = read_trained_on(public, artifacts.read_manifest(public))
        if known is not None:
            write_trained_on(recipe.run_dir, known)
    artifacts.finish(recipe.run_dir, {"best_step": 0, "imported": True})
    log.info(f"imported {source} to {recipe.run_dir}")
    return recipe.run_dir


def read_public_head(path: str, revision: str | None = None) -> tuple[Path, dict[str, Any], dict[str, Tensor]]:
    """Where the files of a head lie, its config.json as written, and its tensors by the names of the file.

    Args:
        path: a directory or a hub id.
        revision: git revision of a hub id; None: the default branch.

    Raises:
        FileNotFoundError: there is no config.json, or no tensors at all.
        ValueError: a file is damaged, the tensors are pickled, or there is an embedding of the mask token beside them.
    """
    directory = local_files(path, revision, ("config.json",), what=_HEAD)
    local_files(path, revision, (MODEL_FILE, INDEX, _MASK), optional=True, what=_HEAD)
    if (directory / INDEX).is_file():
        local_files(path, revision, sorted(set(read_index(directory / INDEX).values())), what=_HEAD)
    if (directory / _MASK).is_file():
        raise ValueError(
            f"{directory / _MASK} is an embedding of the mask token, which an imported head would lose; measure the "
            f"head as it is, as a method of eval.methods with `head: {path}`"
        )
    shards = sorted(directory.glob("*.safetensors"))
    if (directory / INDEX).is_file():  # what else lies there, such as another layout of the same weights, is not read
        shards = sorted({directory / name for name in read_index(directory / INDEX).values()})
    if not shards and (pickles := sorted(path for path in directory.iterdir() if path.suffix in _PICKLES)):
        raise ValueError(
            f"{pickles[0]} is a pickle, which runs whatever code it holds when it is opened. If you trust its maker, "
            "convert it once, in a process of its own: docs/export.md, Heads made elsewhere, has the command"
        )
    check_tensor_files(directory)
    tensors = {name: tensor for shard in shards for name, tensor in load_file(shard).items()}
    config = artifacts.read_json(directory / "config.json")
    if not isinstance(config, dict):
        raise ValueError(f"{directory / 'config.json'} is no JSON object: {str(config)[:80]}; fetch the head again")
    return directory, config, tensors


def _check_type(head: HeadConfig, config: dict[str, Any]) -> None:
    named = set(config.get("architectures") or ())
    known = [kind for kind, drafter in drafters().items() if named & set(drafter.vllm.ARCHITECTURES)]
    if known and head.type not in known:
        raise ValueError(
            f"the head's config.json names {', '.join(sorted(named))}, a head of type {' or '.join(known)}, but the "
            f"recipe's head.type is {head.type}; add head.type={known[0]}"
        )


def _check_recipe(recipe: Recipe, head: HeadConfig, aux_layer_ids: tuple[int, ...]) -> None:
    window = recipe.head.sliding_window or head.sliding_window  # weights fit any: one that the recipe sets is meant
    if window != head.sliding_window:
        log.info(f"the head attends to {window} tokens instead of {head.sliding_window or 'all'}, as the recipe says")
    overrides = [
        f"head.{name}={'null' if value is None else str(value).lower()}"
        for name, value in head.model_copy(update={"sliding_window": window}).architecture().items()
        if getattr(recipe.head, name) != value
    ]
    if recipe.target.aux_layer_ids != aux_layer_ids:
        overrides.append(f"target.aux_layer_ids={list(aux_layer_ids)}".replace(" ", ""))
    if overrides:
        raise ValueError(
            "the recipe describes another head than this one; put these into the recipe, or add to this command and "
            "to those that follow:\n  " + " ".join(overrides)
        )
