"""Held-out prompts: what is refused, what is left out; and the arithmetic of times and of the plan."""

import pytest

from drafthead.data.prompts import Prompt, prompt_id, write_prompts
from drafthead.data.rendering import CONTROL_TOKEN
from drafthead.data.trained_on import write_trained_on
from drafthead.evaluation.identity import identity
from drafthead.evaluation.measuring.request_metrics import achieved_concurrency, request_metrics
from drafthead.evaluation.workload import EvalPrompt, Workload, load_workload, speculative_config
from drafthead.models.target_files import fingerprint_of
from drafthead.provenance import ArtefactError, begin, finish
from drafthead.serving.load import RequestTimes
from tests.evaluation.rows import tiny_recipe


def _prompt(text: str, category: str = "chat") -> Prompt:
    messages = ({"role": "user", "content": text},)
    return Prompt(prompt_id(messages), "test", category, messages)


def _write(recipe, train, heldout):
    begin(recipe.prompts_dir, "prompts", {})
    for split, prompts in (("train", train), ("validation", [_prompt("validate")]), ("heldout", heldout)):
        write_prompts(recipe.prompts_dir / f"{split}.parquet", prompts)
    finish(recipe.prompts_dir, {})


def _times(start: float, ttft: float, gaps: list[float], tokens: int) -> RequestTimes:
    return RequestTimes("p", "", 10, tokens, start, ttft, gaps, ttft + sum(gaps), "")


def test_prompts_that_were_trained_on_are_refused(tmp_path):
    recipe = tiny_recipe(tmp_path)
    _write(recipe, [_prompt("same")], [_prompt("same"), _prompt("other")])
    with pytest.raises(ValueError, match=r"1 held-out prompts are also train prompts \(such as [0-9a-f]{16}\)"):
        load_workload(recipe)


def test_prompts_that_do_not_fit_are_counted(tmp_path):
    recipe = tiny_recipe(tmp_path)
    _write(recipe, [_prompt("train")], [_prompt("short"), _prompt("very long " * 1000)])
    workload = load_workload(recipe)
    assert (len(workload.prompts), workload.too_long) == (1, 1)


def test_nothing_fits(tmp_path):
    recipe = tiny_recipe(tmp_path)
    _write(recipe, [_prompt("train")], [_prompt("very long " * 1000)])
    with pytest.raises(ValueError, match=r"none of the 1 held-out prompts fits: .* raise it or lower eval.max_tokens"):
        load_workload(recipe)


def test_missing_prompts_and_a_head_for_another_target_are_named(tmp_path):
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(ArtefactError, match=r"prompts does not exist; run: python data_gen/prompts.py"):
        load_workload(recipe)
    workload = Workload([EvalPrompt("a", "chat", [1, 2])], 0)
    with pytest.raises(ArtefactError, match=r"heads/tiny does not exist; run: python export/head.py"):
        identity(recipe, workload, ("none", "eagle3"))
    begin(recipe.head_dir, "head", {"target": {"path": "other", "revision": None, "fingerprint": "f" * 64}})
    finish(recipe.head_dir, {})
    with pytest.raises(ArtefactError, match=r"was made for other \(fingerprint ffffffffffff\), but the recipe"):
        identity(recipe, workload, ("none", "eagle3"))


def test_a_head_that_was_trained_on_the_prompts_is_refused(tmp_path, capsys):
    recipe = tiny_recipe(tmp_path)
    _write(recipe, [_prompt("train")], [_prompt("seen"), _prompt("new")])
    workload = load_workload(recipe)
    target = {"fingerprint": fingerprint_of(recipe.target_path)}
    begin(recipe.head_dir, "head", {"target": target})
    finish(recipe.head_dir, {})
    identity(recipe, workload, ("none", "eagle3"))  # a head of elsewhere, which cannot know
    assert "does not say which prompts it was trained on" in capsys.readouterr().out
    write_trained_on(recipe.head_dir, "0" * 64, [_prompt("seen").id, _prompt("else").id])
    finish(recipe.head_dir, {})
    with pytest.raises(ValueError, match=rf"was trained on 1 of the 2 held-out prompts .such as {_prompt('seen').id}"):
        identity(recipe, workload, ("none", "eagle3"))
    identity(recipe, workload, ("none", "ngram"))  # the other arms are not concerned


def test_prompts_without_token_ids_for_the_target_are_counted(tmp_path, capsys):
    recipe = tiny_recipe(tmp_path)
    ids = (5, 6, 7)
    given = Prompt(prompt_id((), ids), "mlperf", "long", (), prompt_ids=ids)
    _write(recipe, [_prompt("train")], [_prompt("obey <|end|>"), given])
    workload = load_workload(recipe)
    assert [p.prompt_ids for p in workload.prompts] == [[5, 6, 7]]
    assert workload.unrenderable == {CONTROL_TOKEN: 1}
    assert f"1 of 2 held-out prompts are left out: {CONTROL_TOKEN}" in capsys.readouterr().out


def test_speculative_configs(tmp_path):
    recipe = tiny_recipe(tmp_path, "eval.num_draft_tokens=2")
    assert speculative_config(recipe, "none") is None
    head = speculative_config(recipe, "eagle3")
    assert head == {"method": "eagle3", "model": str(tmp_path / "heads" / "tiny"), "num_speculative_tokens": 2}
    assert speculative_config(recipe, "ngram")["num_speculative_tokens"] == 2


def test_formulas_of_one_request():
    # Sent at 0; chunks at 1, 2 and 4 s carry 1, 3 and 3 tokens.
    metrics = request_metrics(_times(0, 1.0, [1.0, 2.0], 7))
    assert (metrics.ttft_s, metrics.e2e_s) == (1.0, 4.0)
    assert metrics.tpot_s == pytest.approx(3 / 6)
    assert metrics.itl_s == pytest.approx(1.5)
    assert metrics.tpot_all_s == pytest.approx(4 / 7)


def test_achieved_concurrency():
    # Two at a time, each 1 s long:   0-1, 0-1, 1-2, 1-2, 2-3, 2-3
    steady = [_times(s, 0.5, [0.5], 2) for s in (0, 0, 1, 1, 2, 2)]
    assert achieved_concurrency(steady) == pytest.approx(2.0)
    at_once = [_times(0.0, 0.5, [0.5], 2) for _ in range(5)]  # 200 asked, five prompts: never more than five
    assert achieved_concurrency(at_once) == 5
