"""Every preset in miniature, from its plan to the report of made-up rows: a section for each table of the post."""

import numpy as np
import pandas as pd
import pytest

from drafthead.evaluation.measuring.presets import load_preset, preset_names, preset_plan
from drafthead.evaluation.measuring.serving import plan_prompts
from drafthead.evaluation.reporting.report import build_preset_report, render, write_pages
from drafthead.evaluation.results.levels import MEASURE, completed
from drafthead.evaluation.workload import EvalPrompt, Workload
from tests.evaluation.rows import CATEGORIES, request_row, run_row
from tests.recipes import tiny_recipe

_MANIFEST = {
    "made_by": {"machine": "m", "versions": {"vllm": "0"}, "created": "today", "git_commit": "c"},
    "counts": {"device": "CPU", "servers": 2, "failed": [], "too_long": 0},
}


def _rows(plan):
    """Two prompts at every level of every server; drafts make it twice as fast."""
    rng = np.random.default_rng(0)
    requests, runs = [], []
    for run in plan.runs:
        for level in run.levels:
            concurrency = level.load.concurrency or 0
            key = run.key(level).columns() | {"throughput_only": level.workload.throughput_only}
            rows = [request_row(rng, run.method, concurrency, i, 2.0 if run.k else 1.0, run.k) | key for i in range(2)]
            requests += rows
            runs.append(run_row(run.method, concurrency, rows, run.k) | key | {"prompt_tokens": 200})
    return completed(pd.DataFrame(requests), pd.DataFrame(runs))


def test_what_failed_is_named_and_a_table_of_it_alone_is_left_out(tmp_path):
    preset, recipe = load_preset("rtx-heads"), tiny_recipe(tmp_path)
    plan = preset_plan(recipe, preset, miniature=True)
    baseline = frozenset(key for key in plan.sweeps[0].keys if key.method == "none")
    alone = plan.sweeps[0]._replace(title="of a head that failed", keys=baseline)
    counts = _MANIFEST["counts"] | {"failed": ["long_context-k3-tp1: vLLM did not start"], "too_long": 3}
    plan, manifest = plan._replace(sweeps=(*plan.sweeps, alone)), _MANIFEST | {"counts": counts}
    report = build_preset_report(recipe, preset, plan, _rows(plan), manifest)
    assert any("long_context-k3-tp1: vLLM did not start" in caveat for caveat in report.caveats)
    assert any(caveat.startswith("3 held-out prompts do not fit") for caveat in report.caveats)
    assert [section.title for section in report.sections] == [plan.sweeps[0].title, "Over all of it"]


PRESETS = ["engines", "redhat", "redhat-k", "rtx-heads", "rtx-matrix", "ruiz", "techniques"]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_fits_the_embedded_recipe_and_every_table_of_the_post_has_a_section(tmp_path, name):
    assert preset_names() == PRESETS
    preset = load_preset(name)
    recipe = tiny_recipe(tmp_path, "eval.price_per_gpu_hour=3")
    plan = preset_plan(recipe, preset, miniature=True)
    assert plan.runs[0].method == "none"
    assert {run.tensor_parallel for run in plan.runs} == {1}
    prompts = [EvalPrompt(f"{c}{i}", c, [i], "tiny") for c in CATEGORIES for i in range(40)]
    sent = plan_prompts(recipe, plan, Workload(prompts, 0), Workload(prompts, 0))
    assert all(0 < len(requests) <= 4 for requests in sent.values())
    assert len({(level.name, level.first) for run in plan.runs for level in run.levels}) == len(sent)
    report = build_preset_report(recipe, preset, plan, _rows(plan), _MANIFEST)
    assert [section.title for section in report.sections] == [*(s.title for s in preset.sweeps), "Over all of it"]
    for sweep, section in zip(preset.sweeps, report.sections, strict=False):
        wide, *others = section.tables
        assert {f"{MEASURE[key].label} ({MEASURE[key].unit})" for key in sweep.measures} <= set(wide.frame)
        faster = [row for row in wide.rows if "K = " in row[2].text]
        column = list(wide.frame).index("Output throughput (tok/s)")
        assert faster
        assert all(60 < float(row[column].text.split()[1]) < 140 for row in faster)
        assert any(table.title.startswith("Cost per 1M") for table in others)
        by_position = [row[0].text for t in others if t.title == "Acceptance by position" for row in t.rows]
        text = not all(workload.throughput_only for workload in sweep.workloads)
        assert ("EAGLE-3 head" in by_position) == text
    page = write_pages(report, tmp_path / "out")
    assert page.read_text().count("<table>") == sum(len(section.tables) for section in report.sections)
    assert preset.title in render(report, "report.md.jinja")
