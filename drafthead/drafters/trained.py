"""A trained head: a verified checkpoint, and its run's record of how the head was trained.

Read by whoever goes on from a checkpoint: export, and a run that starts from another run's weights. Only
safetensors and JSON are read, whatever ZeRO stage and number of ranks wrote the checkpoint; DeepSpeed's own
files beside them are pickles, and are left to the run that wrote them.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from drafthead import artifacts
from drafthead.config import Recipe
from drafthead.drafters.base import DraftShape, draft_shape
from drafthead.drafters.config import HeadConfig
from drafthead.drafters.registry import parse_head
from drafthead.target.spec import TargetSpec, target_names

RUN = "run"  # kind of the artifact that checkpoints lie in
MODEL_FILE, STATE_FILE = "model.safetensors", "state.json"
_TRAIN = "accelerate launch train/eagle3.py RECIPE"
# In a run's record when they are not the target's: an imported head has its own.
OWN = ("rope_parameters", "rms_norm_eps")


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        path: directory of the checkpoint, in `checkpoints/` of a run.
        run_dir: directory of that run.
        state: step and predicted acceptance, which is None where this step was not validated.
        run: identity of the run: what the head was trained on and how.
        reference: reference of the complete run; None while it is still going.
    """

    path: Path
    run_dir: Path
    state: dict[str, Any]
    run: dict[str, Any]
    reference: str | None

    @property
    def aux_layer_ids(self) -> tuple[int, ...]:
        """Boundaries the head was trained on."""
        return tuple(self.run["aux_layer_ids"])

    def weights(self) -> dict[str, Tensor]:
        """float32 parameters with d2t and t2d."""
        return load_file(self.path / MODEL_FILE)

    def draft_vocab_size(self) -> int:
        """D; when it was chosen by coverage, no recipe knows it."""
        with safe_open(self.path / MODEL_FILE, framework="pt") as file:
            (size,) = file.get_slice("d2t").get_shape()
        return size

    def head(self) -> HeadConfig:
        """The head section that the run was trained with."""
        return parse_head(self.run["head"])

    def differences(self, recipe: Recipe, spec: TargetSpec) -> str:
        """What the recipe says otherwise than the head was trained, a line per key; empty where nothing differs.

        By what weights and arithmetic follow from; a vocabulary that coverage chose is the head's own.
        """
        head, described = ({**h.architecture(), "coverage": None} for h in (self.head(), recipe.head))
        head["draft_vocab_size"] = self.draft_vocab_size()
        if recipe.head.coverage is not None:
            described["draft_vocab_size"] = head["draft_vocab_size"]
        trained_on, target = target_names(self.run["target"], recipe, spec)
        actual = {"head": described, "target": target, "target.aux_layer_ids": list(recipe.target.aux_layer_ids)}
        expected = {"head": head, "target": trained_on, "target.aux_layer_ids": list(self.aux_layer_ids)}
        return artifacts.describe_difference(actual, expected)

    def shape(self, spec: TargetSpec) -> DraftShape:
        """The head's shape as the run trained it, whatever the recipe says today."""
        head = self.head().sized(self.draft_vocab_size())
        shape = draft_shape(head, spec, self.aux_layer_ids)
        return replace(shape, **{key: self.run[key] for key in OWN if key in self.run})


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir / "checkpoints" / f"step_{step:08d}"


def best_checkpoint(run_dir: Path) -> Path:
    """Where the checkpoint of a finished run lies that it found to be the best.

    Raises:
        ArtifactError: there is no finished run.
    """
    manifest = artifacts.require(run_dir, RUN, _TRAIN, thinned=True)
    return checkpoint_dir(run_dir, manifest["counts"]["best_step"])


def read_checkpoint(path: Path) -> Checkpoint:
    """Open a checkpoint, whose run may still be going.

    Raises:
        ArtifactError: it is damaged, no checkpoint at all, or does not lie in the run that wrote it.
    """
    if not (path / artifacts.MANIFEST).is_file():
        known = ", ".join(sorted(p.name for p in path.parent.glob("step_*"))) or "none"
        again = "" if known != "none" else "; they were deleted: delete the run too, and train it again"
        raise artifacts.ArtifactError(f"{path} is not a checkpoint; {path.parent} has: {known}{again}")
    if broken := artifacts.verify_files(path):
        raise artifacts.ArtifactError(f"{path} is damaged ({', '.join(broken)}); use another checkpoint")
    run_dir = path.resolve().parent.parent
    if not (run_dir / artifacts.IDENTITY).is_file():
        raise artifacts.ArtifactError(
            f"{path} does not lie in the run that wrote it: {run_dir} has no {artifacts.IDENTITY}, which says how "
            "the head was trained; use it from runs/NAME/checkpoints"
        )
    run = artifacts.read_json(run_dir / artifacts.IDENTITY)
    if lacking := {"kind", "head", "aux_layer_ids", "target"} - set(run):
        raise artifacts.ArtifactError(
            f"{run_dir / artifacts.IDENTITY} is not the record of a run (it has no {', '.join(sorted(lacking))}); "
            f"restore it, or delete {run_dir} and train again"
        )
    whole = (run_dir / artifacts.MANIFEST).exists()
    reference = artifacts.reference(artifacts.require(run_dir, RUN, _TRAIN, thinned=True)) if whole else None
    state = artifacts.read_json(path / STATE_FILE)
    if not state.get("measured", True):  # what it carries is of weights some steps before, for the run that resumes
        state |= {"acceptance_length": None, "prompts": 0}
    return Checkpoint(path, run_dir, state, run, reference)
