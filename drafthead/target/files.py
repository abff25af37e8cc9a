"""Where a target's files lie, and which target they are.

A local directory is used as it is; of a hub id only the files asked for are fetched, the cache first. Once a
commit of a branch is in the cache everything is of that commit, until `hf download` fetches a newer one. A
fingerprint that hashed every weight would read 60 GB; this one hashes the small files whole and samples the
large ones, so it gives up seeing a change that touches only bytes between the samples.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, Field

from drafthead.files import reading_external

# What decides a model's shape, its tokens, its prompts and where its responses end.
_SMALL_FILES = (
    "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "chat_template.json",
    "generation_config.json", "tokenizer.model", "vocab.json", "merges.txt", "added_tokens.json",
    "special_tokens_map.json",
)  # fmt: skip
TEMPLATES = "additional_chat_templates"  # a folder of *.jinja
INDEX = "model.safetensors.index.json"
_SAMPLES, _SAMPLE_BYTES = 64, 4096
AGAIN = "Fetch the checkpoint again, or give another target.path"  # about a damaged file
OTHER = "Give another target.path"  # about one that is not supported


class _Index(BaseModel):
    weight_map: dict[str, Annotated[str, Field(pattern=r"^[^/\\]+$")]]  # files beside it


def local_files(
    path: str, revision: str | None, names: Sequence[str], optional: bool = False, what: str = "target"
) -> Path:
    """The directory that holds `names`, fetched from the hub when `path` is no directory.

    Args:
        path: directory or hub id.
        revision: git revision of a hub id; None: the default branch.
        names: names of the files.
        optional: whether files may be missing.
        what: name of the thing that is read, for messages.

    Raises:
        FileNotFoundError: a file is missing here, or can neither be found in the cache nor downloaded.
    """
    directory = Path(path)
    if not directory.is_dir():
        directory = _from_hub(path, revision, tuple(names), optional, what)
    missing = [name for name in names if not (directory / name).is_file()]
    if missing and not optional:
        raise FileNotFoundError(
            f"{what} {path} has no {', '.join(missing)} (looked in {directory}): "
            "give the directory of a whole safetensors checkpoint"
        )
    return directory


def pinned_revision(path: str, revision: str | None = None) -> str | None:
    """The commit that `fingerprint_of` describes, for whatever else loads the target.

    Given a branch, or nothing, a loader that reaches the hub takes the branch's newest commit; here the cache
    comes first. A directory keeps what was given, which nobody looks at.

    Raises:
        FileNotFoundError: as `local_files`.
    """
    if Path(path).is_dir():
        return revision
    return local_files(path, revision, ("config.json",)).name  # snapshots/<commit>


def fingerprint_of(path: str, revision: str | None = None, weights: Sequence[str] = ("model.safetensors",)) -> str:
    """Which target this is: a hex digest that artifacts carry and consumers compare.

    A hub target is the commit of its snapshot, whichever of its files are here. A directory is its small files and,
    of every shard, the size and 64 samples of 4 KiB, spread evenly: other weights of the same shape differ.

    Args:
        path: directory or hub id.
        revision: git revision of a hub id; None: the default branch.
        weights: weight files of a directory without an index.

    Raises:
        FileNotFoundError: config.json or a shard named by the index is missing.
    """
    directory = local_files(path, revision, ("config.json",))
    if not Path(path).is_dir():
        return directory.name  # snapshots/<commit>
    sha = hashlib.sha256()
    templates = sorted(f"{TEMPLATES}/{path.name}" for path in (directory / TEMPLATES).glob("*.jinja"))
    for name in (*_SMALL_FILES, *templates, INDEX):
        if (directory / name).is_file():
            sha.update(f"{name}\n".encode() + (directory / name).read_bytes())
    index = directory / INDEX
    shards = sorted(set(read_index(index).values())) if index.is_file() else list(weights)
    local_files(str(directory), None, shards)  # raises when one is missing
    for shard in shards:
        size = (directory / shard).stat().st_size
        sha.update(f"{shard} {size}\n".encode())
        with (directory / shard).open("rb") as file:
            for i in range(_SAMPLES):
                file.seek((size - _SAMPLE_BYTES) * i // (_SAMPLES - 1) if size > _SAMPLE_BYTES else 0)
                sha.update(file.read(_SAMPLE_BYTES))
    return sha.hexdigest()


def read_index(path: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index of a checkpoint in several files.

    Raises:
        ForeignFileError: it is something else.
    """
    with reading_external(path, AGAIN):
        return _Index.model_validate_json(path.read_bytes()).weight_map


def _from_hub(path: str, revision: str | None, names: tuple[str, ...], optional: bool, what: str) -> Path:
    from huggingface_hub import snapshot_download, try_to_load_from_cache  # lazily: a local target needs no hub client
    from huggingface_hub.errors import HFValidationError

    neither = FileNotFoundError(
        f"{what} {path} does not exist: give a directory with config.json, or a hub id such as openai/gpt-oss-120b"
    )
    if "/" not in path:  # an id without an owner is rather a folder that is not here
        raise neither
    try:
        config = try_to_load_from_cache(path, "config.json", revision=revision)
    except HFValidationError as error:
        raise neither from error
    cached = Path(config).parent if isinstance(config, str) else None
    if cached and all((cached / name).is_file() for name in names):
        return cached
    # More files of the commit that is here: a branch may have moved on since.
    commit = cached.name if cached else revision
    try:
        return Path(snapshot_download(path, revision=commit, allow_patterns=list(names)))
    except OSError as error:
        if optional and cached:
            return cached
        at = f" at revision {revision}" if revision else ""
        raise FileNotFoundError(
            f"{', '.join(names)} of {path}{at}, which is no directory here, are not in the cache and cannot be "
            f"downloaded ({type(error).__name__}): run `hf download {path} {' '.join(names)}` where there is a network "
            "(without the names: the whole model), or give a directory"
        ) from error
