"""The prompts that a head was made from, kept with the head, so that no evaluation uses them by mistake.

A run's directory has the same file when its weights did not begin with the target: an imported head, or another
run's. It holds what is known of their past, and goes on into every head exported from the run.

A head's manifest names its run, a run its states, and so on back to the prompts, but those folders stay behind when
a head is moved. So the ids themselves travel: a file in the head's directory, under the head's manifest. An id is a
hash of a prompt's content, so another recipe's prompts are recognised too.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from drafthead.files import sha256_file, write_json
from drafthead.provenance import ArtefactError, read_json

FILE = "training_prompts.json"


def write_trained_on(directory: Path, prompts: str | None, ids: Iterable[str]) -> None:
    """Write the ids of the training and validation prompts into a head's or a run's directory.

    Args:
        directory: before its manifest is written.
        prompts: reference of the prompts artefact of the last run; None where none is known.
        ids: of its training and validation prompts.
    """
    write_json(directory / FILE, {"prompts": prompts, "ids": sorted(ids)})


def read_trained_on(directory: Path, manifest: dict[str, Any]) -> set[str] | None:
    """Ids of the prompts that a head was made from; None when its manifest lists no such file.

    Raises:
        ArtefactError: the file is not the one that the manifest lists.
    """
    listed = manifest["files"].get(FILE)
    if listed is None:
        return None
    path = directory / FILE
    if not path.is_file() or sha256_file(path) != listed["sha256"]:
        raise ArtefactError(f"{path} is missing or not what the head's manifest lists; export the head again")
    return set(read_json(path)["ids"])


def known_before(run_dir: Path) -> set[str] | None:
    """Ids of the prompts behind the weights that a run began with; None when it does not say."""
    path = run_dir / FILE
    return set(read_json(path)["ids"]) if path.is_file() else None
