"""Time to acceptance trains on a store, scores every stretch and writes nothing into the recipe's directories."""

import json
import os
import sys

import pytest

from drafthead.config import REPO_ROOT
from drafthead.data.store import StateStore
from drafthead.drafters.registry import drafter_of
from drafthead.exporting.check import choose_documents, replayed_rounds
from drafthead.exporting.importing import read_public_head
from drafthead.target.spec import load_target_spec
from tests.scripts import run_python
from tests.training.synthetic import SMALL, small_recipe, synthetic_store

STEPS = ("--steps", "5", "--every", "2", "--threads", "1")


def run_benchmark(output, *arguments: str):
    command = ("benchmarks/time_to_acceptance.py", f"output_dir={output}", *SMALL, "train.epochs=2", *arguments)
    return run_python(*command, PYTHONPATH=os.fspath(REPO_ROOT), PIP_NO_INDEX="1")


@pytest.mark.slow
@pytest.mark.long
def test_ours_is_timed_and_scored_until_the_last_step(tmp_path):
    output, found = tmp_path / "out", tmp_path / "time.json"
    recipe = small_recipe(output)
    synthetic_store(recipe, "train", 40, seed=0)
    synthetic_store(recipe, "validation", 16, seed=1)
    target = ("--contestants", "ours,specforge same", "--envs", str(tmp_path), "--target", "1.0", "--json", str(found))
    result = run_benchmark(output, *STEPS, *target, "--heads", str(tmp_path / "heads"))
    assert result.returncode == 1, result.stderr  # all else is measured where one is not installed
    summary = json.loads(found.read_text())
    same, shipped = summary["contestants"]
    assert (same["name"], shipped["name"]) == ("ours same", "ours shipped")
    assert not summary["failed"]
    longer = shipped["ahead"]["ours same"]["value"]
    assert longer == pytest.approx(same["points"][-1]["length"] / shipped["points"][-1]["length"] - 1)
    for row in (same, shipped):
        assert [point["step"] for point in row["points"]] == [0, 2, 4, 5]
        seconds = [point["seconds"] for point in row["points"]]
        assert seconds == sorted(set(seconds))
        assert all(1 <= point["length"] <= 1 + summary["num_draft_tokens"] for point in row["points"])
        assert row["steps"] == 2  # no length is below 1
        assert row["final"]["low"] <= row["points"][-1]["length"] <= row["final"]["high"]
        assert row["points"][-1]["accepted"] != row["points"][0]["accepted"]  # it has learnt
    assert [path.name for path in output.iterdir()] == ["data"]
    store, files = StateStore(recipe.states_dir("validation")), drafter_of(recipe.head).vllm
    documents, _ = choose_documents(store, recipe, sys.maxsize, sys.maxsize)
    for row in (same, shipped):  # the heads that are kept are those that were scored last
        _, config, tensors = read_public_head(str(tmp_path / "heads" / row["name"].replace(" ", "-")))
        weights = files.checkpoint_tensors(tensors)
        shape, _ = files.describe(config, weights, load_target_spec(recipe.target_path), None)
        rounds = replayed_rounds(recipe, store, documents, weights, shape)
        assert [found.accepted for found in rounds] == row["points"][-1]["accepted"]


def test_an_unknown_contestant_is_named(tmp_path):
    result = run_benchmark(tmp_path, "--contestants", "ours same,nobody")
    assert result.returncode == 1
    assert "nobody" in result.stderr
