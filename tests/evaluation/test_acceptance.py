"""Acceptance against real vLLM, with drafts that need no head of ours: n-gram, and random ones of other methods."""

from collections import Counter

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
from tests.scripts import run_ok


def _prompts(kind: str, count: int) -> list[Prompt]:
    return [ask(f"{kind} {i}: repeat a b c d a b c d a b c d") for i in range(count)]


def write_some_prompts(recipe: Recipe) -> None:
    """Six held-out prompts."""
    write_prompt_artifact(recipe, train=_prompts("train", 2), heldout=_prompts("heldout", 6))


def _measure(recipe: Recipe) -> None:
    """Run the recipe script in a process of its own.

    The n-gram engine imports numba, and vLLM 0.32 cannot start a further engine in a process that holds
    llvmlite (its kernel dispatcher trips over one of llvmlite's objects).
    """
    run_ok("eval/acceptance.py", f"output_dir={recipe.output_dir}", *_SETTINGS, timeout_s=240)


_SETTINGS = ("eval.methods=[ngram]", "eval.max_tokens=24", "eval.num_draft_tokens=[3,1]", "eval.temperatures=[0,0.7]")


@pytest.mark.slow
def test_every_request_is_counted_and_a_rerun_keeps_what_is_there(tmp_path):
    recipe = tiny_recipe(tmp_path, *_SETTINGS)
    write_some_prompts(recipe)
    directory = recipe.results_dir / "acceptance"
    _measure(recipe)
    rows = read_acceptance(directory)
    assert rows.groupby("arm").size().to_dict() == {"none": 6, "none-again": 6, "ngram": 6}
    ngram = rows[rows["arm"] == "ngram"]
    assert (ngram["accepted"] == [sum(a) for a in ngram["accepted_at"]]).all()
    assert (ngram["accepted"] <= ngram["proposed"]).all()
    assert (ngram["proposed"] <= recipe.eval.num_draft_tokens * ngram["drafts"]).all()
    assert all(list(a) == sorted(a, reverse=True) for a in ngram["accepted_at"])  # a position implies those before
    assert (rows.loc[rows["arm"] != "ngram", "drafts"] == 0).all()
    assert summarise_acceptance(rows).identical["ngram"].value >= 0.5  # bf16: rounding may differ, most must agree
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
    _measure(recipe)
    assert lost.exists()
    assert (directory / "arm-none.parquet").stat().st_mtime_ns == written
    assert verify_files(directory) == []


@pytest.mark.slow
def test_several_engines_make_the_rows_of_one(tmp_path):
    """Two take a share of the baseline, one n-gram; in float32, where text does not depend on the batch."""
    settings = ("eval.methods=[ngram]", "eval.max_tokens=16", "eval.temperatures=[0,0.7]", "target.dtype=float32")
    found = {}
    for workers in (1, 4):
        recipe = tiny_recipe(tmp_path / str(workers), *settings)
        write_some_prompts(recipe)
        overrides = (f"output_dir={recipe.output_dir}", *settings)
        run_ok("eval/acceptance.py", "--workers", str(workers), *overrides, timeout_s=240)
        directory = recipe.results_dir / "acceptance-float32"
        assert verify_files(directory) == []
        found[workers] = {path.name: pd.read_parquet(path) for path in directory.rglob("*.parquet")}
    assert found[1].keys() == found[4].keys()
    assert len(found[1]) == 4
    for name, rows in found[1].items():
        pd.testing.assert_frame_equal(rows, found[4][name])


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
    run_ok("eval/acceptance.py", *settings, timeout_s=500)
    rows = read_acceptance(recipe.results_dir / "acceptance")
    for method in made:
        own = rows[rows["arm"] == method]
        assert (own["proposed"] == 2 * own["drafts"]).all()
        assert own["drafts"].sum() > 0
    assert rows.groupby("arm")["output_sha256"].agg(frozenset).nunique() == 1  # drafts never change greedy text
