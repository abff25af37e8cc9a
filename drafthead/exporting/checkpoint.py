"""The checkpoint that is exported, and how the run that wrote it trained the head."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from drafthead import provenance
from drafthead.config import HeadConfig, Recipe
from drafthead.models.draft import DraftShape, draft_shape
from drafthead.models.target import TargetSpec

_TRAIN = "accelerate launch train/eagle3.py RECIPE"


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint.

    Attributes:
        path: its directory, in `checkpoints/` of a run.
        state: step, predicted acceptance and learning so far.
        run: the run's identity: what the head was trained on and how.
        reference: of the whole run; None while it is still going.
    """

    path: Path
    state: dict[str, Any]
    run: dict[str, Any]
    reference: str | None

    @property
    def tap_ids(self) -> tuple[int, ...]:
        """Boundaries the head was trained on."""
        return tuple(self.run["tap_ids"])

    def weights(self) -> dict[str, Tensor]:
        """float32 parameters with d2t and t2d."""
        return load_file(self.path / "model.safetensors")

    def shape(self, recipe: Recipe, spec: TargetSpec) -> DraftShape:
        """The head's shape as the run trained it, whatever the recipe says today."""
        with safe_open(self.path / "model.safetensors", framework="pt") as file:
            (size,) = file.get_slice("d2t").get_shape()  # chosen by coverage, the recipe does not know it
        head = HeadConfig.model_validate(self.run["head"]).sized(size)
        target = recipe.target.model_copy(update={"tap_ids": self.tap_ids})
        shape = draft_shape(recipe.model_copy(update={"head": head, "target": target}), spec)
        own = {key: self.run[key] for key in ("rope_parameters", "rms_norm_eps") if key in self.run}  # imported heads
        return replace(shape, **own)


def open_checkpoint(recipe: Recipe, path: Path | None, spec: TargetSpec) -> Checkpoint:
    """The run's best checkpoint, or the one at `path`, which may come from a run that is still going.

    Raises:
        ArtefactError: there is no finished run, the checkpoint is damaged, or it does not lie in its run.
        ValueError: the run trained another head than the recipe describes; the message names every difference.
    """
    if path is None:
        manifest = provenance.require(recipe.run_dir, "run", _TRAIN)
        path = recipe.run_dir / "checkpoints" / f"step_{manifest['counts']['best_step']:08d}"
    state = _verified_state(path)
    run_dir = path.resolve().parent.parent
    if not (run_dir / provenance.IDENTITY).is_file():
        raise provenance.ArtefactError(
            f"{path} does not lie in the run that wrote it: {run_dir} has no {provenance.IDENTITY}, which says how "
            "the head was trained; export it from runs/NAME/checkpoints"
        )
    run = provenance.read_json(run_dir / provenance.IDENTITY)
    _check_recipe(recipe, spec, run, run_dir)
    whole = (run_dir / provenance.MANIFEST).exists()
    reference = provenance.reference(provenance.require(run_dir, "run", _TRAIN)) if whole else None
    return Checkpoint(path, state, run, reference)


def _verified_state(source: Path) -> dict[str, Any]:
    if not (source / provenance.MANIFEST).is_file():
        known = ", ".join(sorted(p.name for p in source.parent.glob("step_*"))) or "none"
        raise provenance.ArtefactError(f"{source} is not a checkpoint; {source.parent} has: {known}")
    broken = provenance.verify_files(source)
    if broken:
        raise provenance.ArtefactError(f"{source} is damaged ({', '.join(broken)}); export another checkpoint")
    return provenance.read_json(source / "state.json")


def _check_recipe(recipe: Recipe, spec: TargetSpec, run: dict[str, Any], run_dir: Path) -> None:
    """A switch such as norm_before_residual changes no tensor's shape, only what the head computes."""
    described = {
        "head": recipe.head.model_dump(mode="json"),
        "target.tap_ids": list(recipe.target.tap_ids),
        "target fingerprint": spec.fingerprint,
    }
    trained = {
        "head": HeadConfig.model_validate(run["head"]).model_dump(mode="json"),
        "target.tap_ids": run["tap_ids"],
        "target fingerprint": run["target"]["fingerprint"],
    }
    if described != trained:
        lines = provenance.describe_difference(trained, described)
        raise ValueError(
            f"{run_dir} trained another head than the recipe describes:\n"
            f"{lines.replace('found', 'trained').replace('wanted', 'to be served')}\n"
            "restore these keys of the recipe: the weights only work as they were trained"
        )
