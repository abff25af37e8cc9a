"""Where a run's weights begin: another run's checkpoint (`train.init_from`), instead of the target's rows.

    runs/NAME/start/model.safetensors     a copy of those weights: the run needs its ancestor no more
    runs/NAME/training_prompts.json       prompts that the ancestor is known to have learned from

Only weights are taken over: draft vocabulary, rotary embedding and norms belong to them, while optimiser, schedule
and order of the data are the new run's own. The copy costs a checkpoint's weights on disk; without it a run could
not be resumed once its ancestor has been deleted.
"""

import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from drafthead import provenance
from drafthead.config import Recipe
from drafthead.data.prompts import ids_of
from drafthead.data.trained_on import known_before, write_trained_on
from drafthead.drafters.eagle3.model import DraftModel, DraftShape
from drafthead.drafters.trained import MODEL_FILE, OWN, Checkpoint, best_checkpoint, read_checkpoint
from drafthead.files import atomic_path, sha256_file
from drafthead.progress import wait_until
from drafthead.target.pieces import TargetSpec, target_names

_RECORD = "started_from"
_IMPORT = "python export/import_head.py RECIPE name=OTHER --head"


@dataclass(frozen=True)
class Start:
    """Weights that a run begins with.

    Attributes:
        identity: what the run's own record says of them: `started_from`, and what is not the target's.
        file: float32 parameters with d2t and t2d.
        prompts: ids that they are known to be made from; None when nothing is known.
    """

    identity: dict[str, Any]
    file: Path
    prompts: set[str] | None = None

    def weights(self) -> dict[str, Tensor]:
        """float32 parameters with d2t and t2d.

        Raises:
            ArtefactError: the file is not the one that the run's record names.
        """
        if sha256_file(self.file) != self.identity[_RECORD]["weights"]:
            raise provenance.ArtefactError(f"{self.file} is not what the run says it begins with: delete the run")
        return load_file(self.file)

    def shape(self, shape: DraftShape) -> DraftShape:
        """The recipe's shape with the head's own rotary embedding and norms."""
        return replace(shape, **{key: self.identity[key] for key in OWN if key in self.identity})


def find_start(recipe: Recipe, spec: TargetSpec) -> Start | None:
    """What the recipe's run begins with; None when it is the target.

    A run that has begun reads its own copy. Otherwise the checkpoint is verified and compared with the recipe.

    Raises:
        ArtefactError: `train.init_from` is no verified checkpoint.
        ValueError: it holds another head than the recipe describes; the message has both values of every key.
    """
    if recipe.train.init_from is None:
        return None
    kept = _copy_of(recipe)
    if kept.exists():
        run = provenance.read_json(recipe.run_dir / provenance.IDENTITY)
        return Start({key: run[key] for key in (_RECORD, *OWN) if key in run}, kept)
    source = read_checkpoint(_located(recipe))
    _check_recipe(recipe, spec, source)
    return Start(_identity(recipe.train.init_from, source), source.file, _prompts_of(source))


def keep_start(recipe: Recipe, start: Start) -> Start:
    """Copy the weights into the run that has just been claimed; every rank calls this and rank 0 writes."""
    kept = _copy_of(recipe)
    if kept.exists():
        return replace(start, file=kept)
    if int(os.environ.get("RANK", "0")):
        wait_until(kept.exists, f"rank 0 to copy {start.file}", quiet=True)
        return replace(start, file=kept)
    if start.prompts is None:
        print(f"which prompts {recipe.train.init_from} was trained on is not known: the exported head cannot say so")
    else:
        write_trained_on(recipe.run_dir, None, start.prompts)
    with atomic_path(kept) as temporary:
        shutil.copyfile(start.file, temporary)
    return replace(start, file=kept)


def started_model(shape: DraftShape, weights: dict[str, Tensor], blind: bool) -> DraftModel:
    """The head with these weights.

    Args:
        shape: of the head.
        weights: float32 parameters with d2t and t2d.
        blind: zero fc, as a run without hidden states does.
    """
    model = DraftModel(shape)
    parameters = {name: weights[name] for name in weights if name not in ("d2t", "t2d")}
    model.load_state_dict(parameters)
    if blind:
        with torch.no_grad():
            model.fc.weight.zero_()
    return model


def _copy_of(recipe: Recipe) -> Path:
    return recipe.run_dir / "start" / MODEL_FILE


def _located(recipe: Recipe) -> Path:
    """The checkpoint's directory; a run's own directory means its best checkpoint."""
    given = str(recipe.train.init_from)
    path = recipe.directory(given)
    if not path.is_dir():
        raise FileNotFoundError(
            f"train.init_from {given} is no directory (looked at {path}): give runs/NAME or one of its checkpoints. "
            f"A head from the hub is imported first: {_IMPORT} {given}"
        )
    if (path / "config.json").exists():
        raise ValueError(
            f"train.init_from {given} is a head made for serving: import it first, {_IMPORT} {given}, "
            "and start from runs/OTHER"
        )
    if path.resolve() == recipe.run_dir.resolve() or recipe.run_dir.resolve() in path.resolve().parents:
        raise ValueError(
            f"train.init_from {given} is the recipe's own run: to resume it leave train.init_from out, "
            "to train on from its weights give the new run another name (name=...)"
        )
    return best_checkpoint(path) if (path / provenance.IDENTITY).exists() else path


def _check_recipe(recipe: Recipe, spec: TargetSpec, source: Checkpoint) -> None:
    described, head = recipe.head.model_dump(), source.head().model_dump()
    size = source.draft_vocab_size()
    # A size by coverage comes from the head as well; what it covers of this run's text is printed.
    head["draft_vocab_size"] = size
    if described["coverage"] is None:
        head["coverage"] = None
    elif described["coverage"] == head["coverage"]:
        described["draft_vocab_size"] = size
    wanted = {f"head.{key}": value for key, value in described.items()}
    found = {f"head.{key}": value for key, value in head.items()}
    heads_target, target = target_names(source.run["target"], recipe, spec)
    wanted |= {"target.aux_layer_ids": list(recipe.target.aux_layer_ids), "target": target}
    found |= {"target.aux_layer_ids": list(source.aux_layer_ids), "target": heads_target}
    lines = [f"  {key}: recipe {wanted[key]!r}, head {found[key]!r}" for key in wanted if wanted[key] != found[key]]
    if lines:
        raise ValueError(
            f"train.init_from {recipe.train.init_from} holds another head than the recipe describes:\n"
            + "\n".join(lines)
            + "\nput the head's values into the recipe, or start from a head that fits it"
        )


def _identity(given: str, source: Checkpoint) -> dict[str, Any]:
    files = provenance.read_json(source.path / provenance.MANIFEST)["files"]
    record = {
        "path": given,
        "checkpoint": source.path.name,
        "step": source.state["step"],
        "weights": files[MODEL_FILE]["sha256"],
        "run": source.reference,
        **{key: source.run[key] for key in ("imported", _RECORD) if key in source.run},
    }
    return {_RECORD: record, **{key: source.run[key] for key in OWN if key in source.run}}


def _prompts_of(source: Checkpoint) -> set[str] | None:
    """Ids of the prompts behind a checkpoint, its own run's and those of what that one began with."""
    before = known_before(source.run_dir)
    if "imported" in source.run:
        return before
    prompts = source.run_dir.parents[1] / "data" / source.run_dir.name / "prompts"
    if not (prompts / provenance.MANIFEST).exists() or (before is None and _RECORD in source.run):
        return None
    return (before or set()) | ids_of(prompts, ("train", "validation"))
