"""Published figures: their arithmetic comes out of our formulas, and their errors are found."""

import pytest

from drafthead.evaluation.measuring.presets import load_preset
from drafthead.evaluation.reporting.published import figures, published, published_table
from drafthead.evaluation.results.levels import MEASURE, completed, summarise_serving
from tests.evaluation.rows import NAMES, each, served, slower, together
from tests.recipes import tiny_recipe
from tools.check_published import errata


def test_every_figure_names_a_measure_of_ours_or_is_only_checked():
    assert {figure.key for figure in figures()} - set(MEASURE) == {
        "cost_per_million", "cost_per_request", "requests_per_hour",
    }  # fmt: skip
    rates = [e for e in published()["acceptance"] if "rate" in e]
    assert all(abs((float(e["length"]) - 1) / e["K"] - float(e["rate"]) / 100) < 0.005 for e in rates)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("mlperf-gpt-oss, 2 GPU(s), K = 3, geomean, ttfot_p95_s: 6.18 → 6.75", "longer"),
        ("itl_answer_p95_ms: 16.5 → 15.9 printed as +6.6", "+3.04 to +4.23"),
        ("concurrency 200 with 100 prompts", "100 requests"),
        ("acceptance length 0.91 at K = 1", "1 + accepted / drafts is 1.91"),
        ("swe-bench, baseline: 4.41 per 1M", "per GPU it is 0.55"),
        ("swe-bench, 1 GPU(s), K = 3, geomean, ttfot_p95_s: ", "unresolved"),
        ("total 258.95", "249.46"),
        ("e2e_speedup: 1.98", "2.40"),
        ("training of EAGLE-3", "16.67 $ an hour, the post's own price is 3.26"),
        ("--speculative-decoding eagle3", "--speculative-config"),
    ],
)
def test_published_errors_are_flagged(what, why):
    assert [e for e in errata() if what in e.what and why in e.why]


def test_a_sound_figure_is_not_flagged():
    flagged = " ".join(e.what for e in errata())
    assert "sharegpt-first, 1 GPU(s), K = 3" not in flagged
    assert "361.35" not in flagged
    assert "concurrency 100 " not in flagged


def test_the_same_target_workload_and_statistic_stand_beside_the_published_ones(tmp_path):
    """A mean over all of the post's loads, at its temperature: greedy responses here take twice as long."""
    loads = published()["posts"]["redhat"]["concurrency"]
    rows = served(tiny_recipe(tmp_path), head_speed=dict.fromkeys(loads, 1.35), workloads=("mlperf-gpt-oss", "mine"))
    hot = completed(*each(rows, lambda f: f.assign(temperature=1.0)))
    cold = each(rows, lambda f: slower(f, 1 + (f["method"] != "none")))
    measures = load_preset("redhat").sweeps[0].measures
    levels, target = summarise_serving(together(cold, hot), measures), "openai/gpt-oss-120b"
    table = published_table(levels, NAMES, target)
    found = {row[1].text: row for row in table.rows}
    assert len(found) == 6  # all that the post prints of it, on one GPU
    speed = found["mlperf-gpt-oss, 1 GPU(s), K = 3, geomean, output_tokens_per_s"]
    assert (speed[4].text, speed[5].text[:2]) == ("+9.5 %", "+3")
    assert published_table(levels, NAMES, "another/model") is None
    assert published_table([level for level in levels if level.key.workload == "mine"], NAMES, target) is None
    assert published_table([level for level in levels if level.key.concurrency <= 5], NAMES, target) is None
