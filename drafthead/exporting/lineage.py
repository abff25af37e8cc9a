"""Which prompts and how much work a head was made from, found by walking back from its run, for the head's manifest."""

from pathlib import Path
from typing import Any

from drafthead.config import Recipe
from drafthead.data.prompts import ids_of
from drafthead.data.trained_on import known_before, write_trained_on
from drafthead.provenance import IDENTITY, MANIFEST, ArtefactError, read_json, read_manifest, reference

_SPLITS = ("train", "validation")  # validation picks the checkpoint


def record_prompts(recipe: Recipe, directory: Path) -> None:
    """Write the ids of the run's prompts into the head's directory, before its manifest.

    Prompts behind the weights that the run began with are among them, as far as they are known. Responses, states and
    run are checked to be made from the prompts that are here, as far as they are still on disk. Where nothing is known
    nothing is written, and a line says so.

    Raises:
        ArtefactError: one of them was made from other prompts.
    """
    before, run = known_before(recipe.run_dir), recipe.run_dir / IDENTITY
    imported = run.exists() and "imported" in read_json(run)  # the recipe's prompts are not what it learned from
    if imported or not (recipe.prompts_dir / MANIFEST).exists():
        if before is not None:
            write_trained_on(directory, None, before)
            return
        why = "it was imported" if imported else f"{recipe.prompts_dir} is not here"
        print(f"{why}: the head will not say which prompts it was trained on")
        return
    prompts = reference(read_manifest(recipe.prompts_dir))
    for split in _SPLITS:
        _check_chain(recipe, split, prompts)
    write_trained_on(directory, prompts, ids_of(recipe.prompts_dir, _SPLITS) | (before or set()))


def training_cost(run_dir: Path) -> dict[str, Any] | None:
    """Wall time and ranks of the run that trained a head; None for one that was imported, or is still being trained.

    Regenerating answers and harvesting states come on top: neither stage keeps its time.
    """
    if not (run_dir / MANIFEST).exists():
        return None
    counts = read_manifest(run_dir)["counts"]
    if "train_seconds" not in counts:
        return None
    return {"seconds": counts["train_seconds"], "ranks": counts["world_size"]}


def _check_chain(recipe: Recipe, split: str, prompts: str) -> None:
    """prompts <- responses <- states <- run: each names what it was made from; one that is absent ends the walk."""
    made_from, source = prompts, recipe.prompts_dir
    identity: dict | None = None  # of the source: what a run names instead, if the states passed through a spool
    chain = (
        (recipe.responses_dir(split), ("prompts",)),
        (recipe.states_dir(split), ("responses",)),
        (recipe.run_dir, ("states", split)),
    )
    for directory, keys in chain:
        if not (directory / MANIFEST).exists():
            return
        manifest = read_manifest(directory)
        found = manifest["identity"]
        for key in keys:
            found = (found or {}).get(key)
        if found is not None and found not in (made_from, identity):
            raise ArtefactError(
                f"{directory} was made from another version of {source} ({_short(found)}, not {_short(made_from)}), so "
                "the prompts here are not those that the head learned from; restore them, or train again"
            )
        made_from, source, identity = reference(manifest), directory, manifest["identity"]


def _short(reference_or_identity: str | dict) -> str:
    return reference_or_identity[:12] if isinstance(reference_or_identity, str) else "an online run's spool"
