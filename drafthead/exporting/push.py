"""Uploading a finished head to the Hugging Face hub. Private unless asked otherwise, and only when asked."""

from pathlib import Path

from drafthead import provenance
from drafthead.exporting.card import CARD
from drafthead.exporting.speculators import is_speculators

_FILES = ("config.json", "model.safetensors", CARD)


def push_head(directory: Path, repo: str, public: bool = False) -> str:
    """Upload the files an engine reads and the card; manifests stay here, since they hold local paths.

    Args:
        directory: a finished head.
        repo: owner/name; created if it does not exist. The visibility of one that exists is left as it is.
        public: create it public.

    Returns:
        Address of the commit.

    Raises:
        ArtefactError: the head is not finished or its files have changed since.
        ValueError: the head names its target by a local path, which means nothing to anyone else.
    """
    from huggingface_hub import HfApi

    provenance.require(directory, "head", "python export/head.py RECIPE", every_byte=True)
    config = provenance.read_json(directory / "config.json")
    if is_speculators(config) and Path(config["speculators_config"]["verifier"]["name_or_path"]).exists():
        raise ValueError(f"{directory} names its target by a local path; give target.path a hub id and export again")
    api = HfApi()
    api.create_repo(repo, private=not public, exist_ok=True)
    commit = api.upload_folder(repo_id=repo, folder_path=directory, allow_patterns=list(_FILES))
    return commit.commit_url
