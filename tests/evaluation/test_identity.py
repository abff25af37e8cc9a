"""Methods with drafts of others, through the recipe script: random drafts, served by real vLLM."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from drafthead.config import REPO_ROOT
from drafthead.evaluation.identity import identity, missing_package
from drafthead.evaluation.measuring.acceptance import read_acceptance
from drafthead.evaluation.workload import EvalPrompt, Workload, speculative_config
from tests.evaluation.drafts import write_eagle, write_llama, write_medusa
from tests.evaluation.rows import tiny_recipe
from tests.evaluation.test_acceptance import write_prompt_artefact


@pytest.mark.presets
def test_drafts_of_others_are_served_side_by_side(tmp_path):
    recipe = tiny_recipe(tmp_path)
    made = {
        "draft_model": write_llama(tmp_path / "llama", recipe),
        "eagle": write_eagle(tmp_path / "eagle", recipe),
        "medusa": write_medusa(tmp_path / "medusa", recipe),
    }
    arms = ",".join(f"{{name: {method}, method: {method}, head: {path}}}" for method, path in made.items())
    settings = (f"output_dir={tmp_path}", f"eval.methods=[{arms}]", "eval.max_tokens=16", "eval.num_draft_tokens=2")
    write_prompt_artefact(tiny_recipe(tmp_path))
    subprocess.run([sys.executable, str(REPO_ROOT / "eval" / "acceptance.py"), *settings], check=True, timeout=500)
    rows = read_acceptance(recipe.results_dir / "acceptance")
    for method in made:
        of_arm = rows[rows["arm"] == method]
        assert (of_arm["proposed"] == 2 * of_arm["drafts"]).all()
        assert of_arm["drafts"].sum() > 0
    assert rows.groupby("arm")["output_sha256"].agg(frozenset).nunique() == 1  # drafts never change greedy text


def test_extra_keys_and_heads_reach_vllm(tmp_path):
    schedule = "{name: dynamic, method: eagle3, head: data_gen/tiny/target, extra: {parallel_drafting: true}}"
    recipe = tiny_recipe(tmp_path, f"eval.methods=[ngram,{schedule}]")
    assert speculative_config(recipe, "dynamic", 2) == {
        "method": "eagle3", "model": recipe.target_path, "num_speculative_tokens": 2, "parallel_drafting": True,
    }  # fmt: skip
    with pytest.raises(ValueError, match="no arm public in eval.methods; there are eagle3, ngram, suffix, dynamic"):
        speculative_config(recipe, "public")


def test_a_draft_that_is_none_is_named(tmp_path):
    workload = Workload([EvalPrompt("a", "chat", [1, 2])], 0)
    (tmp_path / "empty").mkdir()
    for head, message in ((tmp_path / "gone", "gone does not exist"), (tmp_path / "empty", "Medusa.*MedusaModel")):
        recipe = tiny_recipe(tmp_path, f"eval.methods=[{{name: mine, method: medusa, head: {head}}}]")
        with pytest.raises(FileNotFoundError, match=message):
            identity(recipe, workload, ("none", "mine"))


def test_a_head_that_cannot_draft_in_parallel_is_named(tmp_path):
    workload = Workload([EvalPrompt("a", "chat", [1, 2])], 0)
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text("{}")
    save_file({"fc.weight": torch.zeros(2, 2)}, head / "model.safetensors")
    arm = f"{{name: parallel, method: eagle3, head: {head}, extra: {{parallel_drafting: true}}}}"
    recipe = tiny_recipe(tmp_path, f"eval.methods=[{arm}]")
    with pytest.raises(ValueError, match=r"no mask token.* and its weights hold no mask_hidden.*p-eagle"):
        identity(recipe, workload, ("none", "parallel"))
    (head / "config.json").write_text('{"ptd_token_id": 0}')
    save_file({"mask_hidden": torch.zeros(1, 2)}, head / "model.safetensors")
    assert identity(recipe, workload, ("none", "parallel"))["arms"][0]["name"] == "parallel"


def test_a_method_whose_package_is_missing_is_refused_before_anything_starts(tmp_path):
    if missing_package("suffix") is None:
        pytest.skip("arctic-inference is installed")
    recipe = tiny_recipe(tmp_path, "eval.methods=[suffix]")
    with pytest.raises(ValueError, match="arm suffix: .*pip install arctic-inference"):
        identity(recipe, Workload([EvalPrompt("a", "chat", [1, 2])], 0), ("none", "suffix"))
