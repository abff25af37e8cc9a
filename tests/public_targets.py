"""Public targets of the shipped recipes: what of each config.json this project reads, in folders named like hub ids."""

import shutil
from pathlib import Path

from drafthead.config import REPO_ROOT, Recipe, load_recipe
from tests.artifacts import cached_snapshot

TARGETS = Path(__file__).parent / "targets"
RECIPES = sorted(path.stem for path in (REPO_ROOT / "configs").glob("*.yaml") if path.stem != "tiny")
# Targets of recipes that a tool of this project writes, under the name of the checkpoint on the hub.
_WRITTEN_HERE = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}


def shipped_recipe(name: str, *overrides: str) -> Recipe:
    """A recipe of `configs/`, its target in the cache that `fill_hub` makes."""
    target = [f"target.path={_WRITTEN_HERE[name]}"] if name in _WRITTEN_HERE else []
    return load_recipe(REPO_ROOT / "configs" / f"{name}.yaml", [*target, *overrides])


def fill_hub(cache: Path) -> None:
    """Put every config.json into a cache of the hub, as a download would leave it."""
    for source in TARGETS.iterdir():
        shutil.copytree(source, cached_snapshot(cache, f"models--{source.name}", "0" * 40), dirs_exist_ok=True)
