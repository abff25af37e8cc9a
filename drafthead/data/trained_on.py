"""The ids of the prompts that a head was trained on, kept with the head, so that no evaluation uses them by mistake.

A head's manifest names its run, a run its states, and so on back to the prompts, but those folders stay behind when
a head is moved. So the ids themselves are stored in the head's directory, listed in its manifest. An id is a hash of a
prompt's content, so prompts of other recipes are recognised too. A run has the same file when its weights were
initialised from another head: with the prompts of that head, which every head exported from the run inherits.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from drafthead.artifacts import ArtifactError, read_json
from drafthead.files import sha256_file, write_json

FILE = "training_prompts.json"


def write_trained_on(directory: Path, prompts: str | None, ids: Iterable[str]) -> None:
    """Write the ids of the training and validation prompts into a head's or a run's directory.

    Args:
        directory: before its manifest is written.
        prompts: reference of the prompts artifact of the last run; None where none is known.
        ids: of its training and validation prompts.
    """
    write_json(directory / FILE, {"prompts": prompts, "ids": sorted(ids)})


def read_trained_on(directory: Path, manifest: dict[str, Any]) -> set[str] | None:
    """Ids of the prompts that a head was trained on; None when its manifest lists no such file.

    Raises:
        ArtifactError: the file is not the one that the manifest lists.
    """
    listed = manifest["files"].get(FILE)
    if listed is None:
        return None
    path = directory / FILE
    if not path.is_file() or sha256_file(path) != listed["sha256"]:
        raise ArtifactError(f"{path} is missing or not what the head's manifest lists; export the head again")
    return known_before(directory)


def known_before(run_dir: Path) -> set[str] | None:
    """Ids of the prompts behind the weights that a run was initialised from; None when there is no such file."""
    path = run_dir / FILE
    return set(read_json(path)["ids"]) if path.is_file() else None
