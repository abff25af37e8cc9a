"""One W&B run for training, a resumed training and the evaluation, read back from what is written offline."""

import struct
import time
from pathlib import Path

import pytest

from drafthead.evaluation.decision.analysis import analyse
from drafthead.evaluation.reporting.report import build_report, tracked, write_pages
from drafthead.tracking import log_results, wandb_run
from tests.evaluation.rows import write_results
from tests.recipes import tiny_recipe

_BLOCK, _HEADER = 32768, 7


def _records(path: Path) -> list:
    """W&B's offline file: a header of 7 bytes, then records of LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts, found = path.read_bytes(), _HEADER, b"", []
    while at + _HEADER <= len(data):
        if _BLOCK - at % _BLOCK < _HEADER:
            at += _BLOCK - at % _BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + _HEADER])
        parts += data[at + _HEADER : at + _HEADER + length]
        at += _HEADER + length
        if kind in (1, 4):  # full, last
            found.append(Record.FromString(parts))
            parts = b""
    return found


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
    while "report" not in str(_records(paths[-1])) and time.monotonic() < deadline:
        time.sleep(0.2)
    written = [_records(path) for path in paths]
    runs = [record.run for records in written for record in records if record.HasField("run")]
    assert len(written) == 3
    assert {(run.run_id, run.display_name, run.run_group) for run in runs} == {
        (wandb_run(recipe)["id"], "tiny", recipe.target.path)
    }
    summary = "".join(str(record.summary) for record in written[-1])
    assert "evaluation/verdict/all/eagle3-k3" in summary
    assert any("report" in str(record.history) or "report" in str(record.files) for record in written[-1])


def test_another_tracker_is_left_alone(tmp_path):
    recipe = tiny_recipe(tmp_path)
    log_results(recipe, {}, tmp_path / "report.html")
    assert not (recipe.run_dir / "wandb").exists()
