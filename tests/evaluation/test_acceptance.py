"""What acceptance counts in real vLLM, with random drafts; what trained ones and n-gram bring: tests/pipeline."""

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
from drafthead.exporting.export import write_head
from tests.artifacts import ask, write_prompt_artifact
from tests.evaluation.drafts import write_eagle, write_llama, write_medusa
from tests.exporting.runs import random_weights, recipe_at, shape_of
from tests.recipes import tiny_recipe
from tests.warm import run_warm


def _prompts(kind: str, count: int) -> list[Prompt]:
    return [ask(f"{kind} {i}: repeat a b c d a b c d a b c d") for i in range(count)]


def write_some_prompts(recipe: Recipe) -> None:
    """Six held-out prompts."""
    write_prompt_artifact(recipe, train=_prompts("train", 2), heldout=_prompts("heldout", 6))


_SETTINGS = ("eval.max_tokens=24", "eval.num_draft_tokens=[3,1]", "eval.temperatures=[0,0.7]")


def _measure(root: Path, head: Path, *options: str) -> Path:
    """Run the recipe script in float32, where text does not depend on the batch; returns the directory of its rows."""
    methods = f"eval.methods=[{{name: random, method: eagle3, head: {head}}}]"
    run_warm("eval/acceptance.py", f"output_dir={root}", "target.dtype=float32", methods, *_SETTINGS, *options)
    return tiny_recipe(root).results_dir / "acceptance-float32"


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Path, Path]:
    """A random head, and the rows of one engine after the other."""
    recipe = recipe_at(tmp_path_factory.mktemp("one"), "target.dtype=float32")
    shape = shape_of(recipe)
    write_head(recipe, recipe.head_dir, random_weights(shape), shape, recipe.target.aux_layer_ids)
    write_some_prompts(recipe)
    return recipe.head_dir, _measure(Path(recipe.output_dir), recipe.head_dir)


@pytest.fixture
def again(measured, tmp_path) -> tuple[Path, Path]:
    """The head, and a copy of the rows as if the measurement had been killed before its end."""
    head, directory = measured
    shutil.copytree(directory.parents[2], tmp_path, dirs_exist_ok=True)
    copy = tmp_path / directory.relative_to(directory.parents[2])
    (copy / "manifest.json").unlink()
    return head, copy


@pytest.mark.slow
def test_every_request_is_counted(measured):
    rows, every = read_acceptance(measured[1]), read_conditions(measured[1])
    assert rows.groupby("arm").size().to_dict() == {"none": 6, "none-again": 6, "random": 6}
    assert (rows.loc[rows["arm"] != "random", "drafts"] == 0).all()
    assert summarise_acceptance(rows).identical["random"].value == 1
    assert np.isfinite(rows["repeated"]).all()
    assert every.groupby(["arm", "k", "temperature"]).size().to_dict() == {
        ("none", 0, 0.0): 6, ("none", 0, 0.7): 6, ("none-again", 0, 0.0): 6,
        **{("random", k, t): 6 for k in (1, 3) for t in (0.0, 0.7)},
    }  # fmt: skip
    assert list(every.columns) == list(ACCEPTANCE_COLUMNS)
    drafted = every[every["arm"] == "random"]
    assert (drafted["drafts"] > 10).all()
    assert (drafted["proposed"] <= drafted["k"] * drafted["drafts"]).all()
    assert (drafted["proposed"] > (drafted["k"] - 1) * drafted["drafts"]).all()  # the last steps may propose fewer
    assert all(sum(r) == n for r, n in zip(every.reached_at, every.proposed, strict=True) if len(r) == 1)
    assert len(summarise_conditions(every)) == 5 * 2  # four of the head and the second baseline; all and chat


@pytest.mark.slow
def test_a_rerun_keeps_what_is_there(again):
    head, directory = again
    lost, kept = directory / "also-random-k1-t0.7-medium.parquet", directory / "arm-none.parquet"
    written = kept.stat().st_mtime_ns
    lost.unlink()
    _measure(directory.parents[2], head)
    assert lost.exists()
    assert kept.stat().st_mtime_ns == written
    assert verify_files(directory) == []


@pytest.mark.slow
def test_the_baseline_of_another_recipe_is_not_measured_again(measured, tmp_path):
    """Of another head on the same prompts; a damaged file of it is not taken, nor does a damaged manifest stop it."""
    head, directory = measured
    shutil.copytree(directory.parents[2], tmp_path, dirs_exist_ok=True)
    first = tmp_path / directory.relative_to(directory.parents[2])
    damaged = first / "also-none-k0-t0.7-medium.parquet"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"?")
    (tmp_path / "results" / "broken" / first.name).mkdir(parents=True)
    (tmp_path / "results" / "broken" / first.name / "manifest.json").write_text("{")
    methods = f"eval.methods=[{{name: random, method: eagle3, head: {head}, num_draft_tokens: 1}}]"
    command = ("eval/acceptance.py", f"output_dir={tmp_path}", "target.dtype=float32", "data=tiny", *_SETTINGS, methods)
    told = run_warm(*command, "name=second")
    assert f"those of {first}: arm-none.parquet" in told
    assert damaged.name not in told
    second = tmp_path / "results" / "second" / directory.name
    assert verify_files(second) == []
    assert (second / "arm-none.parquet").read_bytes() == (first / "arm-none.parquet").read_bytes()
    for rows in (read_acceptance(directory), read_acceptance(second)):
        assert rows.groupby("arm").size().to_dict() == {"none": 6, "none-again": 6, "random": 6}
    assert "baseline's rows" not in run_warm(*command, "name=third", "eval.max_tokens=23")  # another baseline


@pytest.mark.slow
def test_several_engines_make_the_rows_of_one(measured, again):
    """Two take a share each of the baseline; the head's rows are there already."""
    head, directory = again
    baseline = [path for path in directory.glob("*.parquet") if "-none" in path.name]
    for path in baseline:
        path.unlink()
    _measure(directory.parents[2], head, "--workers", "2")
    assert verify_files(directory) == []
    assert len(baseline) == 2
    for path in baseline:
        pd.testing.assert_frame_equal(pd.read_parquet(path), pd.read_parquet(measured[1] / path.name))


def test_shares_are_as_long_as_engines_allow(tmp_path):
    """Passes: three of the baseline, two of n-gram at each of two K."""
    recipe = tiny_recipe(tmp_path, "eval.methods=[ngram]", *_SETTINGS)
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
