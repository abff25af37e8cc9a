"""The other drafters, chosen on the command line, on the store that the embedded recipe harvested."""

import json
from pathlib import Path

import pytest

from drafthead.artifacts import require
from drafthead.config import load_recipe
from drafthead.exporting.check import TOLERANCE
from tests.pipeline.small_run import overrides_for
from tests.scripts import accelerate, run_ok

pytestmark = pytest.mark.slow
EPOCHS = {"peagle": 1, "dflash": 2, "dspark": 1}  # until drafts are accepted


@pytest.fixture(scope="module", params=EPOCHS)
def run(request, tiny_run, tmp_path_factory) -> tuple[tuple[str, ...], str]:
    """A head of two layers: the overrides that made it, and what its export printed."""
    root = tmp_path_factory.mktemp(request.param)
    (root / "data").symlink_to(Path(tiny_run.output_dir) / "data")
    kind = (
        "head.mask_token_id=9",
        "head.num_draft_positions=4",
        "head.num_layers=2",
        f"head.type={request.param}",
        f"train.epochs={EPOCHS[request.param]}",
    )
    overrides = overrides_for(root, f"name={request.param}", f"data={tiny_run.name}", *kind)
    run_ok(*accelerate(), "train/draft.py", *overrides)
    return overrides, run_ok("export/head.py", *overrides)


def test_it_learns_and_is_served_as_predicted(run):
    overrides, printed = run
    recipe = load_recipe(overrides=overrides)
    lines = [json.loads(line) for line in (recipe.run_dir / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["kind"] == "train"]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    counts = require(recipe.head_dir, "head", "")["counts"]
    if recipe.head.type == "dspark":  # model runner V2 serves it, on GPUs
        assert counts["serve_check"] is None
        assert "GPUs only" in printed
        return
    check = counts["serve_check"]
    assert check["predicted"] > 1.15, "a head that is never accepted proves nothing"
    assert check["served"] == pytest.approx(check["predicted"], rel=TOLERANCE)


def test_the_card_names_it(run):
    overrides, _ = run
    recipe = load_recipe(overrides=overrides)
    card = (recipe.head_dir / "README.md").read_text()
    assert {"peagle": "P-EAGLE", "dflash": "DFlash", "dspark": "DSpark"}[recipe.head.type] in card
