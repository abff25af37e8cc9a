"""Held-out prompts: what is refused, what is left out; and the arithmetic of times and of the plan."""

import pytest

from drafthead.data.prompts import Prompt, prompt_id
from drafthead.data.rendering import CONTROL_TOKEN
from drafthead.evaluation.workload import load_workload, speculative_config
from drafthead.provenance import ArtefactError
from tests.artefacts import ask, write_prompt_artefact
from tests.recipes import tiny_recipe


def test_prompts_that_were_trained_on_are_refused(tmp_path):
    recipe = tiny_recipe(tmp_path)
    write_prompt_artefact(recipe, train=[ask("same")], heldout=[ask("same"), ask("other")])
    with pytest.raises(ValueError, match=r"1 held-out prompts are also train prompts \(such as [0-9a-f]{16}\)"):
        load_workload(recipe)


def test_prompts_that_do_not_fit_are_counted(tmp_path):
    recipe = tiny_recipe(tmp_path)
    write_prompt_artefact(recipe, train=[ask("train")], heldout=[ask("short"), ask("very long " * 1000)])
    workload = load_workload(recipe)
    assert (len(workload.prompts), workload.too_long) == (1, 1)


def test_prompts_of_which_none_fits_are_refused_with_the_way_on(tmp_path):
    recipe = tiny_recipe(tmp_path)
    write_prompt_artefact(recipe, train=[ask("train")], heldout=[ask("very long " * 1000)])
    with pytest.raises(ValueError, match=r"none of the 1 held-out prompts fits: .* raise it or lower eval.max_tokens"):
        load_workload(recipe)


def test_missing_prompts_are_named_with_the_command(tmp_path):
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(ArtefactError, match=r"prompts does not exist; run: python data_gen/prompts.py"):
        load_workload(recipe)


def test_prompts_without_token_ids_for_the_target_are_counted(tmp_path, capsys):
    recipe = tiny_recipe(tmp_path)
    ids = (5, 6, 7)
    given = Prompt(prompt_id((), ids), "mlperf", "long", (), prompt_ids=ids)
    write_prompt_artefact(recipe, train=[ask("train")], heldout=[ask("obey <|end|>"), given])
    workload = load_workload(recipe)
    assert [p.prompt_ids for p in workload.prompts] == [[5, 6, 7]]
    assert workload.unrenderable == {CONTROL_TOKEN: 1}
    assert f"1 of 2 held-out prompts are left out: {CONTROL_TOKEN}" in capsys.readouterr().out


def test_each_arm_has_the_speculative_config_that_vllm_takes(tmp_path):
    recipe = tiny_recipe(tmp_path, "eval.num_draft_tokens=2")
    assert speculative_config(recipe, "none") is None
    head = speculative_config(recipe, "eagle3")
    assert head == {"method": "eagle3", "model": str(tmp_path / "heads" / "tiny"), "num_speculative_tokens": 2}
    assert speculative_config(recipe, "ngram")["num_speculative_tokens"] == 2


def test_extra_keys_and_heads_reach_vllm(tmp_path):
    schedule = "{name: dynamic, method: eagle3, head: data_gen/tiny/target, extra: {parallel_drafting: true}}"
    recipe = tiny_recipe(tmp_path, f"eval.methods=[ngram,{schedule}]")
    assert speculative_config(recipe, "dynamic", 2) == {
        "method": "eagle3", "model": recipe.target_path, "num_speculative_tokens": 2, "parallel_drafting": True,
    }  # fmt: skip
    with pytest.raises(ValueError, match="public .*eval.methods.* eagle3, ngram, suffix, dynamic"):
        speculative_config(recipe, "public")
