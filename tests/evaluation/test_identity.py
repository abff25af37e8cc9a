"""What results are measured with: the heads of all arms, read and refused before an engine starts."""

import pytest
import torch
from safetensors.torch import save_file

from drafthead.data.trained_on import write_trained_on
from drafthead.evaluation.workload import EvalPrompt, Workload, identity, load_workload, missing_package
from drafthead.provenance import ArtefactError, begin, finish
from drafthead.target.files import fingerprint_of
from tests.artefacts import ask, write_prompt_artefact
from tests.recipes import tiny_recipe

WORKLOAD = Workload([EvalPrompt("a", "chat", [1, 2])], 0)


def test_a_missing_head_and_one_for_another_target_are_named(tmp_path):
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(ArtefactError, match=r"heads/tiny does not exist; run: python export/head.py"):
        identity(recipe, WORKLOAD, ("none", "eagle3"))
    begin(recipe.head_dir, "head", {"target": {"path": "other", "revision": None, "fingerprint": "f" * 64}})
    finish(recipe.head_dir, {})
    with pytest.raises(ArtefactError, match=r"was made for other \(fingerprint ffffffffffff\), but the recipe"):
        identity(recipe, WORKLOAD, ("none", "eagle3"))


def test_a_head_that_was_trained_on_the_prompts_is_refused(tmp_path, capsys):
    recipe = tiny_recipe(tmp_path)
    write_prompt_artefact(recipe, train=[ask("train")], heldout=[ask("seen"), ask("new")])
    workload = load_workload(recipe)
    target = {"fingerprint": fingerprint_of(recipe.target_path)}
    begin(recipe.head_dir, "head", {"target": target})
    finish(recipe.head_dir, {})
    identity(recipe, workload, ("none", "eagle3"))  # a head of elsewhere, which cannot know
    assert "does not say which prompts it was trained on" in capsys.readouterr().out
    write_trained_on(recipe.head_dir, "0" * 64, [ask("seen").id, ask("else").id])
    finish(recipe.head_dir, {})
    with pytest.raises(ValueError, match=rf"was trained on 1 of the 2 held-out prompts .such as {ask('seen').id}"):
        identity(recipe, workload, ("none", "eagle3"))
    identity(recipe, workload, ("none", "ngram"))  # the other arms are not concerned


def test_a_draft_that_is_none_is_named(tmp_path):
    (tmp_path / "empty").mkdir()
    for head, message in ((tmp_path / "gone", "gone does not exist"), (tmp_path / "empty", "Medusa.*MedusaModel")):
        recipe = tiny_recipe(tmp_path, f"eval.methods=[{{name: mine, method: medusa, head: {head}}}]")
        with pytest.raises(FileNotFoundError, match=message):
            identity(recipe, WORKLOAD, ("none", "mine"))


def test_a_head_that_cannot_draft_in_parallel_is_named(tmp_path):
    head = tmp_path / "head"
    head.mkdir()
    (head / "config.json").write_text("{}")
    save_file({"fc.weight": torch.zeros(2, 2)}, head / "model.safetensors")
    arm = f"{{name: parallel, method: eagle3, head: {head}, extra: {{parallel_drafting: true}}}}"
    recipe = tiny_recipe(tmp_path, f"eval.methods=[{arm}]")
    with pytest.raises(ValueError, match=r"no mask token.* and its weights hold no mask_hidden.*p-eagle"):
        identity(recipe, WORKLOAD, ("none", "parallel"))
    (head / "config.json").write_text('{"ptd_token_id": 0}')
    save_file({"mask_hidden": torch.zeros(1, 2)}, head / "model.safetensors")
    assert identity(recipe, WORKLOAD, ("none", "parallel"))["arms"][0]["name"] == "parallel"


def test_a_method_whose_package_is_missing_is_refused_before_anything_starts(tmp_path):
    if missing_package("suffix") is None:
        pytest.skip("arctic-inference is installed")
    recipe = tiny_recipe(tmp_path, "eval.methods=[suffix]")
    with pytest.raises(ValueError, match="suffix: .*pip install arctic-inference"):
        identity(recipe, WORKLOAD, ("none", "suffix"))
