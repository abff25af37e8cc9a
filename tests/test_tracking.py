"""One W&B run for training, a resumed training and the evaluation, read back from what is written offline."""

import time

import pytest

from drafthead.evaluation.decision.analysis import analyse
from drafthead.evaluation.reporting.report import build_report, tracked, write_pages
from drafthead.tracking import log_results, wandb_run
from tests.evaluation.rows import write_results
from tests.recipes import tiny_recipe


@pytest.mark.slow
def test_the_evaluation_stands_in_the_run_that_trained_the_head(tmp_path, monkeypatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    recipe = tiny_recipe(tmp_path, "train.tracker=wandb")
    for step in (1, 2):  # begun, and resumed
        with wandb.init(project=recipe.name, **wandb_run(recipe)) as run:
            run.log({"train/loss": 1.0}, step=step)
    write_results(recipe, head_speed={1: 1.3, 8: 0.8})
    analysis = analyse(recipe)
    log_results(recipe, tracked(analysis), write_pages(build_report(recipe, analysis), recipe.results_dir))
    paths = sorted((recipe.run_dir / "wandb").glob("offline-run-*/*.wandb"))
    deadline = time.monotonic() + 30  # W&B's own process writes the last file, on a busy machine after we are done
    while b"report" not in paths[-1].read_bytes() and time.monotonic() < deadline:
        time.sleep(0.2)
    written = [path.read_bytes() for path in paths]
    assert len(written) == 3
    assert all(wandb_run(recipe)["id"].encode() in content for content in written)
    assert b"evaluation/verdict/all/head-k3" in written[-1]
    assert b"report" in written[-1]


def test_another_tracker_is_left_alone(tmp_path):
    recipe = tiny_recipe(tmp_path)
    log_results(recipe, {}, tmp_path / "report.html")
    assert not (recipe.run_dir / "wandb").exists()
