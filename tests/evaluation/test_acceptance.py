"""Acceptance against real vLLM, with drafts that need no head of ours: n-gram, and random ones of other methods."""

import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from drafthead.artifacts import verify_files
from drafthead.config import Recipe
from drafthead.data.prompts import Prompt
from drafthead.evaluation.columns import ACCEPTANCE_COLUMNS
from drafthead.evaluation.measuring.acceptance import _shared, conditions, read_acceptance, read_conditions
from drafthead.evaluation.results.summary import summarise_acceptance, summarise_conditions
from drafthead.evaluation.workload import EvalPrompt, Workload
from tests.artifacts import ask, write_prompt_artifact
from tests.evaluation.drafts import write_eagle, write_llama, write_medusa
from tests.recipes import tiny_recipe
from tests.warm import run_warm


def _prompts(kind: str, count: int) -> list[Prompt]:
    return [ask(f"{kind} {i}: repeat a b c d a b c d a b c d") for i in range(count)]


def write_some_prompts(recipe: Recipe) -> None:
    """Six held-out prompts."""
    write_prompt_artifact(recipe, train=_prompts("train", 2), heldout=_prompts("heldout", 6))


_SETTINGS = ("eval.methods=[ngram]", "eval.max_tokens=24", "eval.num_draft_tokens=[3,1]", "eval.temperatures=[0,0.7]")
_EXACT = (*_SETTINGS, "target.dtype=float32")  # text does not depend on the batch


def _measure(root: Path, *options: str) -> Path:
    """Run the recipe script; returns the directory of its rows."""
    recipe = tiny_recipe(root, *_EXACT)
    if not recipe.prompts_dir.exists():
        write_some_prompts(recipe)
    run_warm("eval/acceptance.py", f"output_dir={root}", *_EXACT, *options)
    return recipe.results_dir / "acceptance-float32"


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """The rows of one engine after the other."""
    return _measure(tmp_path_factory.mktemp("one"))


@pytest.mark.slow
def test_every_request_is_counted_and_a_rerun_keeps_what_is_there(measured, tmp_path):
    shutil.copytree(measured.parents[2], tmp_path, dirs_exist_ok=True)
    recipe = tiny_recipe(tmp_path, *_EXACT)
    directory = tmp_path / measured.relative_to(measured.parents[2])
    rows = read_acceptance(directory)
    assert rows.groupby("arm").size().to_dict() == {"none": 6, "none-again": 6, "ngram": 6}
    ngram = rows[rows["arm"] == "ngram"]
    assert (ngram["accepted"] == [sum(a) for a in ngram["accepted_at"]]).all()
    assert (ngram["accepted"] <= ngram["proposed"]).all()
    assert (ngram["proposed"] <= recipe.eval.num_draft_tokens * ngram["drafts"]).all()
    assert all(list(a) == sorted(a, reverse=True) for a in ngram["accepted_at"])  # a position implies those before
    assert (rows.loc[rows["arm"] != "ngram", "drafts"] == 0).all()
    assert summarise_acceptance(rows).identical["ngram"].value == 1
    assert np.isfinite(ngram["repeated"]).all()

    every = read_conditions(directory)
    assert every.groupby(["arm", "k", "temperature"]).size().to_dict() == {
        ("none", 0, 0.0): 6, ("none", 0, 0.7): 6, ("none-again", 0, 0.0): 6,
        **{("ngram", k, t): 6 for k in (1, 3) for t in (0.0, 0.7)},
    }  # fmt: skip
    assert list(every.columns) == list(ACCEPTANCE_COLUMNS)
    assert all(sum(r) == n for r, n in zip(every.reached_at, every.proposed, strict=True) if len(r) == 1)
    assert len(summarise_conditions(every)) == 5 * 2  # four of n-gram and the second baseline; all and chat

    written = (directory / "arm-none.parquet").stat().st_mtime_ns
    (directory / "manifest.json").unlink()  # as if killed before the last method was written
    lost = directory / "also-ngram-k1-t0.7-medium.parquet"
    lost.unlink()
    _measure(tmp_path)
    assert lost.exists()
    assert (directory / "arm-none.parquet").stat().st_mtime_ns == written
    assert verify_files(directory) == []


@pytest.mark.slow
def test_several_engines_make_the_rows_of_one(measured, tmp_path):
    """Two take a share of the baseline, one n-gram at the first K."""
    directory = _measure(tmp_path, "--workers", "4", "eval.num_draft_tokens=3")
    assert verify_files(directory) == []
    found = sorted(directory.rglob("*.parquet"))
    assert len(found) == 4
    for path in found:
        pd.testing.assert_frame_equal(pd.read_parquet(path), pd.read_parquet(measured / path.name))


def test_shares_are_as_long_as_engines_allow(tmp_path):
    """Passes: three of the baseline, two of n-gram at each of two K."""
    recipe = tiny_recipe(tmp_path, *_SETTINGS)
    workload = Workload([EvalPrompt(str(i), "chat", [i], "") for i in range(10)], 0, {})
    found = conditions(recipe)
    for workers, shares in ((1, (1, 1, 1)), (7, (3, 2, 2)), (16, (6, 4, 4))):
        jobs = _shared(tmp_path, found, {"medium": workload}, workers)
        assert tuple(Counter((j.conditions[0].method, j.conditions[0].k) for j in jobs).values()) == shares
        assert sum(job.size for job in jobs) == 7 * 10


@pytest.mark.presets
def test_drafts_of_others_are_served_side_by_side(tmp_path):
    recipe = tiny_recipe(tmp_path)
    made = {
        "draft_model": write_llama(tmp_path / "llama", recipe),
        "eagle": write_eagle(tmp_path / "eagle", recipe),
        "medusa": write_medusa(tmp_path / "medusa", recipe),
    }
    methods = ",".join(f"{{name: {method}, method: {method}, head: {path}}}" for method, path in made.items())
    settings = (f"output_dir={tmp_path}", f"eval.methods=[{methods}]", "eval.max_tokens=16", "eval.num_draft_tokens=2")
    write_some_prompts(recipe)
    run_warm("eval/acceptance.py", *settings)
    rows = read_acceptance(recipe.results_dir / "acceptance")
    for method in made:
        own = rows[rows["arm"] == method]
        assert (own["proposed"] == 2 * own["drafts"]).all()
        assert own["drafts"].sum() > 0
    assert rows.groupby("arm")["output_sha256"].agg(frozenset).nunique() == 1  # drafts never change greedy text
