"""The checkpoint that is exported, and the check that the recipe describes the head it holds."""

from pathlib import Path
from typing import Any

from drafthead import provenance
from drafthead.config import Recipe
from drafthead.drafters.registry import parse_head
from drafthead.drafters.trained import Checkpoint, best_checkpoint, read_checkpoint
from drafthead.target.pieces import TargetSpec, target_names


def open_checkpoint(recipe: Recipe, path: Path | None, spec: TargetSpec) -> Checkpoint:
    """The run's best checkpoint, or the one at `path`, which may come from a run that is still going.

    Raises:
        ArtefactError: there is no finished run, the checkpoint is damaged, or it does not lie in its run.
        ValueError: the run trained another head than the recipe describes; the message names every difference.
    """
    source = read_checkpoint(best_checkpoint(recipe.run_dir) if path is None else path)
    _check_recipe(recipe, spec, source.run, source.run_dir)
    return source


def _check_recipe(recipe: Recipe, spec: TargetSpec, run: dict[str, Any], run_dir: Path) -> None:
    """A switch such as norm_before_residual changes no tensor's shape, only what the head computes."""
    trained_target, target = target_names(run["target"], recipe, spec)
    described = {
        "head": recipe.head.model_dump(mode="json"),
        "target.aux_layer_ids": list(recipe.target.aux_layer_ids),
        "target": target,
    }
    trained = {
        "head": parse_head(run["head"]).model_dump(mode="json"),
        "target.aux_layer_ids": run["aux_layer_ids"],
        "target": trained_target,
    }
    if described != trained:
        lines = provenance.describe_difference(trained, described)
        raise ValueError(
            f"{run_dir} trained another head than the recipe describes:\n"
            f"{lines.replace('found', 'trained').replace('wanted', 'to be served')}\n"
            "restore these keys of the recipe: the weights only work as they were trained"
        )
