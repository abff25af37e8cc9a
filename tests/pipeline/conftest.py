"""The chain at its smallest, run once through the recipe scripts as a user runs them."""

import os

import pytest
from filelock import FileLock

from drafthead.artifacts import MANIFEST
from drafthead.config import Recipe, load_recipe
from tests.pipeline.small_run import overrides_for
from tests.scripts import accelerate, run_ok
from tests.warm import run_warm


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> Recipe:
    """Prompts, responses, states, a trained and an exported head of the embedded recipe; all workers share them."""
    root = tmp_path_factory.getbasetemp()
    root = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "tiny_run"
    root.mkdir(exist_ok=True)
    overrides = overrides_for(root)
    recipe = load_recipe(overrides=overrides)
    with FileLock(root / "lock"):
        if not (recipe.head_dir / MANIFEST).exists():
            for script in ("data_gen/prompts.py", "data_gen/regenerate.py", "data_gen/harvest.py"):
                run_warm(script, *overrides)
            run_ok(*accelerate(), "train/eagle3.py", *overrides)  # in a new interpreter, as a user launches it
            run_warm("export/head.py", *overrides)
    return recipe
