"""The chain at its smallest, run once through the recipe scripts as a user runs them."""

import pytest

from drafthead.config import Recipe, load_recipe
from tests.pipeline.small_run import overrides_for
from tests.scripts import accelerate, run_ok


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory) -> Recipe:
    """Prompts, responses, states, a trained and an exported head of the embedded recipe."""
    overrides = overrides_for(tmp_path_factory.mktemp("tiny"))
    for script in ("data_gen/prompts.py", "data_gen/regenerate.py", "data_gen/harvest.py"):
        run_ok(script, *overrides)
    run_ok(*accelerate(), "train/eagle3.py", *overrides)
    run_ok("export/head.py", *overrides)
    return load_recipe(overrides=overrides)
