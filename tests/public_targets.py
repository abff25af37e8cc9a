"""Public targets of the shipped recipes: what of each config.json this project reads, in folders named like hub ids."""

import shutil
from pathlib import Path

from drafthead.config import REPO_ROOT
from tests.artifacts import cached_snapshot

TARGETS = Path(__file__).parent / "targets"
RECIPES = sorted(path.stem for path in (REPO_ROOT / "configs").glob("*.yaml") if path.stem != "tiny")


def fill_hub(cache: Path) -> None:
    """Put every config.json into a cache of the hub, as a download would leave it."""
    for source in TARGETS.iterdir():
        shutil.copytree(source, cached_snapshot(cache, f"models--{source.name}", "0" * 40), dirs_exist_ok=True)
