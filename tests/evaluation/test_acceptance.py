"""Acceptance against real vLLM, with drafts that need no head of ours: n-gram, and random ones of other methods."""

import numpy as np
import pytest

from drafthead.artifacts import verify_files
from drafthead.config import Recipe
from drafthead.data.prompts import Prompt
from drafthead.evaluation.columns import ACCEPTANCE_COLUMNS
from drafthead.evaluation.measuring.acceptance import read_acceptance, read_conditions
from drafthead.evaluation.results.summary import summarise_acceptance, summarise_conditions
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
