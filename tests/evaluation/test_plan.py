"""Plans of recipes and presets, checked without a server: who is started, what is sent, what is left out and why."""

import re
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import pandas as pd
import pytest

from drafthead import cli
from drafthead.artifacts import MANIFEST, ArtifactError, read_manifest
from drafthead.cli import LEFT_OUT
from drafthead.config.evaluation import HEAD, UNLISTED, Method
from drafthead.engine.server import ServerError
from drafthead.evaluation.measuring import serving
from drafthead.evaluation.measuring.acceptance import conditions
from drafthead.evaluation.measuring.plan import WorkloadSpec, recipe_plan, served_recipe
from drafthead.evaluation.measuring.presets import load_preset, preset_plan, public_methods
from drafthead.evaluation.measuring.serving import measure_serving, plan_prompts
from drafthead.evaluation.results.levels import read_serving
from drafthead.evaluation.workload import EvalPrompt, Workload, load_workload, method_of, speculative_config
from drafthead.generation.prompts import draw_evenly
from tests.artifacts import ask, write_prompt_artifact
from tests.evaluation.rows import request_row, run_row
from tests.recipes import tiny_recipe
from tests.scripts import run_here


def _servers(plan):
    return [(run.method, run.k, run.tensor_parallel) for run in plan.runs]


def _workload(count: int = 20) -> Workload:
    return Workload([EvalPrompt(f"{c}{i}", c, [i], "tiny") for c in ("chat", "code") for i in range(count)], 0)


def test_a_recipe_starts_baseline_and_head_in_abba_order(tmp_path):
    assert _servers(recipe_plan(tiny_recipe(tmp_path))) == [("none", 0, 1), ("head", 3, 1)]
    twice = recipe_plan(tiny_recipe(tmp_path, "eval.repeats=2"))
    assert [(run.block, run.method) for run in twice.runs] == [(0, "none"), (0, "head"), (1, "head"), (1, "none")]


def test_levels_share_prompts_and_mix_categories(tmp_path):
    recipe = tiny_recipe(tmp_path, "eval.prompts_per_level=8", "eval.concurrency=[1,4]")
    prompts = list(plan_prompts(recipe, recipe_plan(recipe), _workload()).values())
    assert [len(requests) for requests in prompts] == [8, 16, 15]
    assert prompts[1][:8] == prompts[0]
    assert sum(r.id.startswith("chat") for r in prompts[0]) == 4


def test_every_evaluation_has_conversations_whose_turns_share_their_prefix(tmp_path):
    recipe = tiny_recipe(tmp_path, "eval.prompts_per_level=8", "eval.concurrency=[1,2]")
    levels = {level.name: sent for level, sent in plan_prompts(recipe, recipe_plan(recipe), _workload()).items()}
    sent = [request.prompt_ids for request in levels["multi-turn-c2-t0"]]
    assert [len(ids) for ids in sent] == [1, 1, 2, 2, 3, 3]  # all first turns, then all second ones
    assert [ids[: len(before)] for before, ids in zip(sent, sent[2:], strict=False)] == sent[:4]
    assert len({r.id for r in levels["multi-turn-c2-t0"]}) == 6


def test_sampled_drafts_are_measured_where_responses_are_sampled(tmp_path):
    for at_zero in ("head", "head,head.sampled"):
        plan = recipe_plan(tiny_recipe(tmp_path, f"eval.served=[{at_zero}]"))
        assert {run.method for run in plan.runs} == {"none", "head"}
    recipe = tiny_recipe(tmp_path, "eval.temperatures=[0,1]")
    levels = {run.method: {level.temperature for level in run.levels} for run in recipe_plan(recipe).runs}
    assert levels == {"none": {0, 1}, "head": {0, 1}, "head.sampled": {1}}
    assert speculative_config(recipe, "head.sampled")["draft_sample_method"] == "probabilistic"
    assert [c.temperature for c in conditions(recipe) if c.method == "head.sampled"] == [1]


def test_every_method_that_may_be_served_unlisted_is_known(tmp_path):
    recipe = tiny_recipe(tmp_path, f"eval.served=[{','.join(UNLISTED)}]")
    assert [method_of(recipe, name).name for name in recipe.eval.served] == list(UNLISTED)


@pytest.mark.slow
def test_vllm_knows_every_method():
    from vllm.config.speculative import SpeculativeMethod

    assert {*get_args(Method)} - {HEAD} <= set(re.findall(r"'(\w+)'", str(SpeculativeMethod)))


@pytest.mark.parametrize(
    ("settings", "places"),
    [
        ((), 64),
        (("eval.concurrency=[1,{concurrency: 90, request_rate: 8}]",), 90),
        (("engine.max_num_seqs=2",), 8),  # of harvesting and regeneration
    ],
)
def test_a_server_has_as_many_places_as_the_highest_load(tmp_path, settings, places):
    assert served_recipe(tiny_recipe(tmp_path, *settings)).engine.max_num_seqs == places


def test_a_level_that_cannot_be_reached_is_refused_before_anything_starts(tmp_path):
    settings = ("eval.concurrency=[200]", "eval.prompts_per_level=8")
    recipe = tiny_recipe(tmp_path, *settings)
    with pytest.raises(ValueError, match="200 .* 40 prompts"):
        plan_prompts(recipe, recipe_plan(recipe), _workload())
    published = recipe_plan(recipe)._replace(sweeps=preset_plan(recipe, load_preset("redhat")).sweeps)
    assert [len(r) for r in plan_prompts(recipe, published, _workload()).values()] == [40, 39]
    one = tiny_recipe(tmp_path, "eval.concurrency=[1]")
    with pytest.raises(ValueError, match="multi-turn has 3 prompts.* 2 held-out"):
        plan_prompts(one, recipe_plan(one), _workload(1))


def test_a_workload_without_prompts_names_what_there_is(tmp_path):
    recipe = tiny_recipe(tmp_path)
    plan = preset_plan(recipe, load_preset("redhat"))
    with pytest.raises(ValueError, match="tiny/chat, tiny/code"):
        plan_prompts(recipe, plan, _workload(), _workload())


def test_a_miniature_of_no_preset_is_refused(tmp_path, capsys):
    assert run_here("eval/serving.py", "--miniature", "--plan", f"output_dir={tmp_path}") == 1
    assert "--preset" in capsys.readouterr().err


def test_redhat_is_run_as_it_was_published(tmp_path):
    plan = preset_plan(tiny_recipe(tmp_path), load_preset("redhat"))
    assert _servers(plan) == [("none", 0, 1), ("head", 3, 1), ("none", 0, 2), ("head", 3, 2)]
    assert {level.workload.name for level in plan.runs[2].levels} == {"mlperf-gpt-oss"}  # two GPUs: that data set only
    assert {run.flags for run in plan.runs} == {()}  # vLLM's defaults
    levels = plan.runs[0].levels[:6]
    assert [level.load.concurrency for level in levels] == [1, 5, 25, 50, 100, 200]
    assert [(level.first, level.prompts) for level in levels] == [(100 * i, 100) for i in range(6)]  # six disjoint sets


def test_disjoint_levels_need_enough_prompts(tmp_path):
    recipe = tiny_recipe(tmp_path)
    prompts = [EvalPrompt(str(i), "chat", [i], "sharegpt") for i in range(550)]
    preset = load_preset("redhat")
    first = preset.sweeps[0]
    sharegpt = preset.model_copy(update={"sweeps": (first.model_copy(update={"workloads": first.workloads[:1]}),)})
    with pytest.raises(ValueError, match="600 of sharegpt-first.* 550"):
        plan_prompts(recipe, preset_plan(recipe, sharegpt), Workload([], 0), Workload(prompts, 0))
    more = [*prompts, *(EvalPrompt(str(i), "chat", [i], "sharegpt") for i in range(550, 600))]
    sent = plan_prompts(recipe, preset_plan(recipe, sharegpt), Workload([], 0), Workload(more, 0))
    assert len({request.id for requests in sent.values() for request in requests}) == 600


def test_a_preset_crosses_workloads_with_loads_and_scales_their_prompts(tmp_path):
    recipe = tiny_recipe(tmp_path)
    matrix = preset_plan(recipe, load_preset("rtx-matrix")).runs[0].levels
    assert len(matrix) == 7 * 5
    assert {level.load.name: level.prompts for level in matrix} == {
        "c1": 16, "c32": 256, "r64-b0.2-c32": 256, "r8-c32": 256, "r2-b4-c32": 256,
    }  # fmt: skip
    assert {level.workload.name for level in matrix if level.workload.throughput_only} == {
        "random_s", "random_m", "random_l", "random_x", "burstgpt",
    }  # fmt: skip
    ruiz = preset_plan(recipe, load_preset("ruiz"))
    assert [run.k for run in ruiz.runs] == list(range(9))
    levels = ruiz.runs[0].levels
    assert all(level.load.request_rate == level.load.concurrency and level.max_tokens == 200 for level in levels)
    highest = {level.workload.name: (level.load.concurrency, level.prompts) for level in levels}
    assert highest == {"mt-bench": (64, 640), "instruct-coder": (256, 2560)}


def test_techniques_vary_one_axis_at_a_time(tmp_path):
    plan = preset_plan(tiny_recipe(tmp_path), load_preset("techniques"))
    head = next(run for run in plan.runs if (run.method, run.k) == ("head", 5))
    axes = {(level.temperature > 0, level.load.name != "c1", level.workload.name != "mixed") for level in head.levels}
    assert all(sum(axis) <= 1 for axis in axes)
    assert {run.k for run in plan.runs if run.method == "head"} == {1, 3, 5, 7, 10, 15}
    assert {run.method for run in plan.runs if "mixed-c1-t0" in {level.name for level in run.levels}} == {
        "none", "head", "ngram"  # what this recipe can serve
    }  # fmt: skip


def test_a_mix_takes_what_its_parts_say_and_does_without_those_that_are_missing(tmp_path):
    recipe = tiny_recipe(tmp_path)
    write_prompt_artifact(recipe, heldout=[replace(ask(s), source=s) for s in ("mt-bench", "instruct-coder")])
    plan = preset_plan(recipe, load_preset("techniques"))
    prompts = [EvalPrompt(f"{s}{i}", s, [i], s) for s in ("mt-bench", "instruct-coder", "gsm8k") for i in range(100)]
    sent = next(
        v for level, v in plan_prompts(recipe, plan, Workload(prompts, 0)).items() if level.name == "mixed-2-of-6-c1-t0"
    )
    assert Counter((r.id.rstrip("0123456789"), r.max_tokens) for r in sent) == {
        ("mt-bench", 100): 100, ("instruct-coder", 500): 80,
    }  # fmt: skip
    assert len({r.max_tokens for r in sent[:20]}) == 2  # side by side, not one after the other
    assert any("creative-writing" in line for line in plan.skipped)


def test_a_workload_without_prompts_is_left_out_with_what_to_add(tmp_path):
    recipe = tiny_recipe(tmp_path)
    preset = load_preset("redhat")
    write_prompt_artifact(recipe, heldout=[replace(ask("a question"), source="sharegpt")])
    plan = preset_plan(recipe, preset)
    assert {level.workload.name for run in plan.runs for level in run.levels} == {"sharegpt-first"}
    assert any("{name: swe-bench, heldout: 600}" in line for line in plan.skipped)
    assert any("under data=tiny-eval" in line for line in plan.skipped)  # what was made of the prompts stays
    shared = preset_plan(recipe, load_preset("ruiz"))  # whose loads share their prompts: as many as the highest needs
    assert any("{name: mt-bench, heldout: 640}" in line for line in shared.skipped)
    nothing = preset_plan(recipe, preset.model_copy(update={"sweeps": preset.sweeps[1:]}))
    assert not nothing.runs
    with pytest.raises(ValueError, match="mlperf-gpt-oss, heldout: 600"):
        measure_serving(recipe, nothing, tmp_path)


def test_a_workload_without_prompts_is_named_before_they_are_made(tmp_path):
    sources = "prompts.sources=[{name: sharegpt, train: 9, heldout: 600},{name: swe-bench, train: 9}]"
    recipe = tiny_recipe(tmp_path, "prompts.path=null", sources)
    plan = preset_plan(recipe, load_preset("redhat"))
    assert {level.workload.name for run in plan.runs for level in run.levels} == {"sharegpt-first"}
    (line,) = (line for line in plan.skipped if "prompts.sources" in line)
    assert line.endswith("{name: swe-bench, heldout: 600}, {name: mlperf-gpt-oss, heldout: 600} to prompts.sources")


def test_the_prompts_advised_for_a_category_hold_enough_of_it(tmp_path):
    recipe = tiny_recipe(tmp_path, "prompts.path=null", "prompts.sources=[{name: ours, path: x, train: 9, heldout: 9}]")
    (line,) = (x for x in preset_plan(recipe, load_preset("techniques")).skipped if "prompts.sources" in x)
    assert line.count("{name: spec-bench, ") == 1
    there = [replace(ask(f"{kind} {i}"), category=f"spec-bench/{kind}") for kind in "abcdefghijklm" for i in range(80)]
    drawn = draw_evenly(there, int(re.search(r"spec-bench, heldout: (\d+)", line)[1]), 0)
    assert sum(prompt.category == "spec-bench/a" for prompt in drawn) == 80


def _measured_without_vllm(failing, recipe, plan, directory, index, prompts):
    run = plan.runs[index]
    if (run.name, run.block) in failing:
        raise ServerError(
            "vLLM did not start: it ended with code 1. Last lines of x.log:\nValueError: no such head\n    "
            "For further information visit https://errors.pydantic.dev/2.14/v/greater_than_equal"
        )
    rng, requests, runs = np.random.default_rng(index), [], []
    for level in run.levels:
        extra = {"k": run.k, "block": run.block, "load": level.load.name, "workload": level.workload.name}
        rows = [request_row(rng, run.method, level.load.concurrency, i, 1.0, run.k) | extra for i in range(16)]
        requests += rows
        runs.append(run_row(run.method, level.load.concurrency, rows, run.k) | extra)
    pd.DataFrame(requests).to_parquet(directory / f"requests-{index:02d}-{run.name}.parquet")
    pd.DataFrame(runs).to_parquet(directory / f"runs-{index:02d}-{run.name}.parquet")


@pytest.mark.parametrize("block", [0, 1], ids=["from the start", "in the second block"])
def test_a_server_that_always_fails_is_left_out_by_the_second_command(tmp_path, monkeypatch, capsys, block):
    broken = "{name: broken, method: ngram, num_draft_tokens: [2]}"
    overrides = ("eval.repeats=2", f"eval.methods=[{broken},ngram]", "eval.served=[broken,ngram]")
    recipe = tiny_recipe(tmp_path, *overrides)
    write_prompt_artifact(recipe, heldout=[ask(f"question {i}") for i in range(32)])
    failing = {("broken-k2-tp1", block)}
    monkeypatch.setattr(serving, "_run_server", partial(_measured_without_vllm, failing))
    command, directory = ("eval/serving.py", f"output_dir={tmp_path}", *overrides), recipe.results_dir / "serving"

    assert run_here(*command) == 1  # the fault may pass: tried again
    assert "Not measured: broken-k2-tp1. " in capsys.readouterr().err
    assert not (directory / MANIFEST).exists()
    before = {path.name: path.read_bytes() for path in directory.glob("*.parquet")}
    for _ in range(2):  # a finished one says so every time
        assert run_here(*command) == LEFT_OUT
        assert "broken-k2-tp1: vLLM did not start" in capsys.readouterr().out
    counts = read_manifest(directory)["counts"]
    assert [line.partition(":")[0] for line in counts["failed"]] == ["broken-k2-tp1"]
    assert counts["failed"][0].endswith("ValueError: no such head")
    assert before.items() <= {path.name: path.read_bytes() for path in directory.glob("*.parquet")}.items()
    rows = read_serving(directory)  # half of the blocks is no comparison
    assert {*rows.runs["method"]} == {*rows.requests["method"]} == {"none", "ngram"}

    failing.clear()
    (directory / MANIFEST).unlink()
    assert run_here(*command) == 0
    assert {*read_serving(directory).runs["method"]} == {"none", "broken", "ngram"}


@pytest.mark.parametrize("lost", ["none", "ngram"])
def test_without_a_comparison_a_measurement_is_never_finished(tmp_path, monkeypatch, lost):
    recipe = tiny_recipe(tmp_path, "eval.methods=[ngram]", "eval.served=[ngram]")
    write_prompt_artifact(recipe, heldout=[ask(f"question {i}") for i in range(32)])
    plan = recipe_plan(recipe)
    failing = {(run.name, 0) for run in plan.runs if run.method == lost}
    monkeypatch.setattr(serving, "_run_server", partial(_measured_without_vllm, failing))
    for _ in range(3):
        with pytest.raises(ServerError, match="the same command continues"):
            measure_serving(recipe, plan, tmp_path / "serving", leave_out=True)


def test_an_evaluation_without_one_of_its_servers_has_its_report(tmp_path, monkeypatch):
    ran = []

    def run(script, arguments, allowed):
        ran.append((script, allowed))
        return LEFT_OUT if script == "eval/serving.py" else 0

    monkeypatch.setattr(cli, "run_script", run)
    assert run_here("eval/head.py", f"output_dir={tmp_path}") == LEFT_OUT
    assert ("eval/serving.py", LEFT_OUT) in ran
    assert ran[-1][0] == "eval/report.py"


def test_no_more_is_drafted_than_a_parallel_head_was_trained_for(tmp_path):
    recipe = tiny_recipe(tmp_path, "head.type=dflash", "head.mask_token_id=9", "head.num_draft_positions=7")
    plan = preset_plan(recipe, load_preset("techniques"))
    assert {run.k for run in plan.runs if run.method == "head"} == {1, 3, 5, 7}
    assert "head: K = 15: it was trained for 7" in plan.skipped


def test_what_another_machine_began_is_not_continued(tmp_path, monkeypatch):
    serving._check_machine(tmp_path)
    serving._check_machine(tmp_path)
    made = serving.made_by()
    monkeypatch.setattr(serving, "made_by", lambda: made | {"machine": "another, 8 CPUs"})
    with pytest.raises(ArtifactError, match="machine: found .*, wanted 'another, 8 CPUs'"):
        serving._check_machine(tmp_path)


def test_public_heads_are_served_for_their_target_only(tmp_path):
    preset = load_preset("rtx-heads")
    recipe = tiny_recipe(tmp_path)
    assert public_methods(recipe, preset) == ()
    assert any(line.startswith("throughput: ") for line in preset_plan(recipe, preset).skipped)
    public = recipe.changed("target", path="openai/gpt-oss-120b")
    servers = _servers(preset_plan(public, preset))
    own = [("none", 0, 1), ("head", 1, 1), ("head", 3, 1)]
    heads = [("short_context", 3, 1), ("long_context", 3, 1), ("throughput", 1, 1), ("throughput", 3, 1)]
    assert servers == [*own, *heads, ("lmsys", 1, 1)]


def test_every_workload_is_measured_alone_and_all_together(tmp_path):
    recipe = tiny_recipe(tmp_path, "eval.prompts_per_level=80", "eval.concurrency=[1,8]", "eval.workloads=category")
    asked = [ask(f"{c} question {i}", category=c) for c in ("chat", "code") for i in range(20)]
    write_prompt_artifact(recipe, heldout=[ask("a question", category="few"), *asked])
    levels = recipe_plan(recipe).runs[0].levels
    assert [(level.workload.name, level.load.name, level.prompts) for level in levels] == [
        *(("all", load, 80) for load in ("c1", "c8")),
        *((name, load, 40) for name in ("chat", "code") for load in ("c1", "c8")),
        ("multi-turn", "c8", 80),
    ]
    alone = tiny_recipe(tmp_path, "eval.workloads=all")
    assert {level.workload.name for level in recipe_plan(alone).runs[0].levels} == {"all", "multi-turn"}


@pytest.mark.parametrize(
    ("asked", "alone"),
    [
        ({"long": "a long question " * 400, "code": "code"}, set()),  # all that is left is `all`
        ({"all": "a question", "code": "code"}, {"code"}),
        ({"multi-turn": "a question", "code": "code"}, {"code"}),
        ({"bench/code": "a question", "code": "code"}, {"bench/code", "code"}),
    ],
    ids=["one that fits", "named as all prompts", "named as the conversations", "named within another"],
)
def test_each_workload_that_can_be_told_and_reached_is_measured_alone(tmp_path, asked, alone):
    recipe = tiny_recipe(tmp_path, "eval.workloads=category")
    heldout = [ask(f"{i} {text}", category=category) for category, text in asked.items() for i in range(20)]
    write_prompt_artifact(recipe, heldout=heldout)
    workload = load_workload(recipe)
    plan = recipe_plan(recipe)
    sent = plan_prompts(recipe, plan, workload)
    assert {level.workload.name for level in plan.runs[0].levels} == {"all", "multi-turn"} | alone
    assert len({level.name for level in sent}) == len(sent)
    categories = {prompt.id: prompt.category for prompt in workload.prompts}
    for level in (level for level in sent if level.workload.name in alone):
        assert {categories[request.id] for request in sent[level]} == {level.workload.name}


def test_methods_without_a_head_are_left_out_with_a_way_to_get_one(tmp_path):
    preset = load_preset("techniques")
    left_out = preset_plan(tiny_recipe(tmp_path), preset).skipped
    assert {"medusa", "eagle", "draft_model"} <= {line.split(":")[0] for line in left_out}
    with_heads = tiny_recipe(tmp_path, "eval.methods=[head,{name: mine, method: medusa, head: somewhere}]")
    plan = preset_plan(with_heads, preset)
    assert ("mine", 5, 1) in _servers(plan)
    assert "medusa" not in " ".join(plan.skipped)


def test_the_preset_of_engines_measures_endpoints_too(tmp_path):
    endpoint = "eval.endpoints=[{name: sglang, url: 'http://10.0.0.1:30000', model: m}]"
    plan = preset_plan(tiny_recipe(tmp_path, endpoint), load_preset("engines"))
    assert [(run.method, run.endpoint) for run in plan.runs] == [("none", False), ("head", False), ("sglang", True)]


def test_random_prompts_are_the_same_every_time_and_hold_no_control_token(tmp_path, tokenizer):
    recipe = tiny_recipe(tmp_path)
    plan = preset_plan(recipe, load_preset("rtx-heads"), miniature=True)
    first, second = (plan_prompts(recipe, plan, _workload()) for _ in range(2))
    assert first == second
    level = plan.runs[0].levels[0]
    assert level.workload == WorkloadSpec(name="random", random=(16, 16))
    assert (level.max_tokens, {len(r.prompt_ids) for r in first[level]}) == (16, {16})
    with pytest.raises(ValueError, match=r"1 more than engine.max_model_len 35"):  # 16, 16, three drafts and the bonus
        plan_prompts(recipe.changed("engine", max_model_len=35), plan, _workload())
    assert not {*tokenizer.all_special_ids} & {token for request in first[level] for token in request.prompt_ids}
