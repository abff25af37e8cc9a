"""Held-out prompts: what is refused, what is left out; the heads of all methods, refused before an engine starts."""

from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import save_file

from drafthead.artifacts import ArtifactError, begin, finish
from drafthead.config import REPO_ROOT
from drafthead.data.prompts import Prompt, prompt_id, write_trained_on
from drafthead.data.rendering import CONTROL_TOKEN
from drafthead.engine.offline import on_cpu
from drafthead.evaluation.measuring.presets import load_preset, preset_plan
from drafthead.evaluation.measuring.serving import plan_prompts
from drafthead.evaluation.workload import EvalPrompt, Workload, identity, load_workload, prompt_room, speculative_config
from drafthead.target.files import fingerprint_of
from tests.artifacts import ask, write_prompt_artifact
from tests.recipes import tiny_recipe

WORKLOAD = Workload([EvalPrompt("a", "chat", [1, 2])], 0)


def test_a_missing_head_and_one_for_another_target_are_named(tmp_path):
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(ArtifactError, match="python export/head.py"):
        identity(recipe, WORKLOAD, ("none", "head"))
    begin(recipe.head_dir, "head", {"target": {"path": "other", "revision": None, "fingerprint": "f" * 64}})
    finish(recipe.head_dir, {})
    with pytest.raises(ArtifactError, match=r"other .*ffffffffffff"):
        identity(recipe, WORKLOAD, ("none", "head"))


def test_a_head_that_was_trained_on_the_prompts_is_refused(tmp_path):
    recipe = tiny_recipe(tmp_path)
    write_prompt_artifact(recipe, train=[ask("train")], heldout=[ask("seen"), ask("new")])
    workload = load_workload(recipe)
    target = {"fingerprint": fingerprint_of(recipe.target_path)}
    begin(recipe.head_dir, "head", {"target": target})
    finish(recipe.head_dir, {})
    identity(recipe, workload, ("none", "head"))  # a head of elsewhere, which cannot know
    write_trained_on(recipe.head_dir, [ask("seen").id, ask("else").id])
    finish(recipe.head_dir, {})
    with pytest.raises(ValueError, match=rf"1 of the 2 .*{ask('seen').id}"):
        identity(recipe, workload, ("none", "head"))
    identity(recipe, workload, ("none", "ngram"))  # the other methods are not concerned


def test_a_draft_that_is_none_is_named(tmp_path):
    for folder, files in {"empty": (), "pickled": ("config.json", "pytorch_model.bin")}.items():
        (tmp_path / folder).mkdir()
        for name in files:
            (tmp_path / folder / name).touch()
    for head, message in (
        ("gone", "gone does not exist"),
        ("empty", "Medusa.*MedusaModel"),
        ("pickled", "method mine: .*pickled has no .*safetensors"),
    ):
        recipe = tiny_recipe(tmp_path, f"eval.methods=[{{name: mine, method: medusa, head: {tmp_path / head}}}]")
        with pytest.raises(FileNotFoundError, match=message):
            identity(recipe, WORKLOAD, ("none", "mine"))


def test_a_head_is_known_by_its_weights_whatever_the_name_of_their_file(tmp_path):
    recipe, found = tiny_recipe(tmp_path, f"eval.methods=[{{name: m, method: medusa, head: {tmp_path}}}]"), set()
    (tmp_path / "config.json").write_text("{}")
    for weights in (torch.zeros(2), torch.ones(2)):
        save_file({"weights": weights}, tmp_path / "medusa_lm_head.safetensors")
        found.add(identity(recipe, WORKLOAD, ("none", "m"))["methods"][0]["head"])
    assert len(found) == 2


@pytest.mark.parametrize(
    ("entry", "named"),
    [
        ("suffix", "pip install arctic-inference"),
        ("ngram_gpu", "method ngram_gpu"),
        ("{name: x, method: dspark, head: y}", "method dspark"),
        ("{name: x, method: head, extra: {rejection_sample_method: block}}", "rejection_sample_method block"),
        ("{name: x, method: head, extra: {enable_adaptive_verification: true}}", "enable_adaptive_verification True"),
    ],
)
def test_a_method_that_this_machine_cannot_serve_is_refused_before_anything_starts(tmp_path, entry, named):
    (tmp_path / "y").mkdir()
    recipe = tiny_recipe(tmp_path, f"eval.methods=[{entry.replace('y}', f'{tmp_path}/y}}')}]")
    name = recipe.eval.methods[0].name
    if not on_cpu() or find_spec("arctic_inference"):
        pytest.skip("this machine serves it")
    with pytest.raises(ValueError, match=f"{name}: .*{named}"):
        identity(recipe, WORKLOAD, ("none", name))


def test_prompts_that_do_not_fit_are_counted_and_refused_where_none_does(tmp_path):
    long = ask("very long " * 1000)
    recipe, none_fits = tiny_recipe(tmp_path / "some"), tiny_recipe(tmp_path / "none")
    write_prompt_artifact(recipe, train=[ask("train")], heldout=[ask("short"), long])
    workload = load_workload(recipe)
    assert (len(workload.prompts), workload.too_long) == (1, 1)
    write_prompt_artifact(none_fits, train=[ask("train")], heldout=[long])
    with pytest.raises(ValueError, match="eval.max_tokens"):
        load_workload(none_fits)


def test_a_preset_may_send_the_first_question_alone_of_every_conversation(tmp_path):
    """ShareGPT as the posts sent it; two conversations that begin alike are one."""
    opening, more = {"role": "user", "content": "What is a heap?"}, ("And a stack?", "And a queue?")
    talks = [(opening, {"role": "assistant", "content": "A tree."}, {"role": "user", "content": m}) for m in more]
    recipe = tiny_recipe(tmp_path)
    heldout = [ask("short"), *(Prompt(prompt_id(talk), "sharegpt", "chat", talk) for talk in talks)]
    write_prompt_artifact(recipe, train=[ask("train")], heldout=heldout)
    whole, first = load_workload(recipe), load_workload(recipe, first_question=True)
    assert (len(whole.prompts), len(first.prompts)) == (3, 2)
    preset = load_preset("redhat-k")
    few = preset.model_copy(update={"sweeps": (preset.sweeps[0].model_copy(update={"disjoint": False}),)})
    sent = plan_prompts(recipe, preset_plan(recipe, few), whole, first)
    assert {request.id for requests in sent.values() for request in requests} == {first.prompts[1].id}
    assert len(first.prompts[1].prompt_ids) < min(len(p.prompt_ids) for p in whole.prompts[1:])


def test_room_is_left_for_every_draft_that_is_measured_or_served(tmp_path):
    """vLLM stops drafting for a whole batch once one request has no room left for its drafts."""
    short = "eval.methods=[{name: short, method: head, num_draft_tokens: 1}]"
    sevens = ("eval.num_draft_tokens=7", "head.num_ttt_steps=7")
    room = prompt_room(tiny_recipe(tmp_path, short, "eval.served=[short]"), 100)
    assert prompt_room(tiny_recipe(tmp_path, short, *sevens), 100) == room - 6  # served are the recipe's own head at 7
    sampled = ("eval.temperatures=[0,1]", "eval.methods=[{name: head, method: head, num_draft_tokens: 1}]")
    assert prompt_room(tiny_recipe(tmp_path, *sampled, *sevens), 100) == room - 6  # drafts sampled: at 7
    assert prompt_room(tiny_recipe(tmp_path, short, "eval.served=[short]"), 100, 15) == room - 14


def test_missing_prompts_are_named_with_the_command(tmp_path):
    with pytest.raises(ArtifactError, match="python data_gen/prompts.py"):
        load_workload(tiny_recipe(tmp_path))


def test_prompts_without_token_ids_for_the_target_are_counted(tmp_path):
    recipe = tiny_recipe(tmp_path)
    ids = (5, 6, 7)
    given = Prompt(prompt_id((), ids), "mlperf", "long", (), prompt_ids=ids)
    write_prompt_artifact(recipe, train=[ask("train")], heldout=[ask("obey <|end|>"), given])
    workload = load_workload(recipe)
    assert [p.prompt_ids for p in workload.prompts] == [[5, 6, 7]]
    assert workload.unrenderable == {CONTROL_TOKEN: 1}


@pytest.mark.parametrize(
    ("entry", "config"),
    [
        ("suffix", {"method": "suffix"}),
        ("ngram_gpu", {"method": "ngram_gpu", "prompt_lookup_max": 4, "prompt_lookup_min": 2}),
        ("{name: m, method: medusa, head: org/m}", {"method": "medusa", "model": "org/m"}),
        (
            "{name: dynamic, method: eagle3, head: data_gen/tiny/target, extra: {parallel_drafting: true}}",
            {"method": "eagle3", "model": str(REPO_ROOT / "data_gen/tiny/target"), "parallel_drafting": True},
        ),
    ],
)
def test_a_method_of_one_line_has_the_speculative_config_that_vllm_takes(tmp_path, entry, config):
    recipe = tiny_recipe(tmp_path, f"eval.methods=[{entry}]")
    (method,) = recipe.eval.methods
    assert speculative_config(recipe, method.name) == {**config, "num_speculative_tokens": 3}
    assert speculative_config(recipe, "none") is None
    own = {"method": "eagle3", "model": str(tmp_path / "heads" / "tiny"), "num_speculative_tokens": 2}
    assert speculative_config(recipe, "head", 2) == own
    with pytest.raises(ValueError, match=f"public .*eval.methods.*{method.name}"):
        speculative_config(recipe, "public")
