"""Published figures: their arithmetic comes out of our formulas, and their errors are found."""

import pytest

from drafthead.evaluation.decision.cost import cost_per_million
from drafthead.evaluation.published.figures import Figure, Printed, find_errata, published
from drafthead.evaluation.reporting.decision_tables import published_table
from drafthead.evaluation.results.levels import summarise_serving
from drafthead.evaluation.results.serving_rows import read_serving
from tests.evaluation.rows import write_results
from tests.recipes import tiny_recipe


def _comparison(workload, gpus=1, statistic="geomean"):
    key = (workload, gpus, statistic)
    return next(c for c in published().comparisons if (c.workload, c.gpus, c.statistic) == key)


@pytest.mark.parametrize(
    ("workload", "gpus", "measure", "percent"),
    [
        ("sharegpt", 1, "output_tokens_per_s", 20.68),
        ("sharegpt", 1, "ttft_p95_s", 12.12),  # 7.31 / 6.52: a time that shrank is a gain
        ("mlperf", 1, "output_tokens_per_s", 9.47),
        ("mlperf", 2, "output_tokens_per_s", 16.01),
        ("mlperf", 2, "ttft_p95_s", -8.44),
        ("swe-bench", 1, "ttft_p95_s", -0.33),
        ("swe-bench", 1, "e2e_p50_s", 18.94),
    ],
)
def test_a_published_change_is_positive_when_it_is_better(workload, gpus, measure, percent):
    assert 100 * _comparison(workload, gpus).of(measure).change == pytest.approx(percent, abs=0.01)


def test_printed_percentages_follow_from_the_printed_figures():
    printed = [figure for c in published().comparisons for figure in c.figures if figure.printed]
    assert len(printed) == 2
    assert all(figure.percent_agrees for figure in printed)
    assert not Figure("x", Printed("970.9"), Printed("1171.7"), Printed("+21.0")).percent_agrees


def test_both_sides_saw_the_same_prompts():
    # Total and output throughput share the wall time, so their ratio is tokens per output token: the same on both.
    for comparison in published().comparisons:
        if comparison.statistic == "geomean":
            output, total = comparison.of("output_tokens_per_s"), comparison.of("total_tokens_per_s")
            ratios = [total.baseline.value / output.baseline.value, total.head.value / output.head.value]
            assert ratios[0] == pytest.approx(ratios[1], rel=0.01)


@pytest.mark.parametrize("side", ["baseline", "head"])
def test_the_cost_per_million_is_the_printed_one(side):
    peak = _comparison("swe-bench", statistic="peak")
    printed = getattr(peak.of("cost_per_million"), side)
    node = published().posts["redhat"]
    cost = cost_per_million(node["node_price_per_hour"], 1, getattr(peak.of("output_tokens_per_s"), side).value)
    assert printed.low <= cost <= printed.high


def test_published_acceptance_falls_as_a_rate_and_grows_as_a_length():
    v2 = [a for a in published().acceptance if a.head == "v2"]
    assert [a.K for a in v2] == [2, 3, 4]
    assert [round(a.rate, 3) for a in v2] == [0.455, 0.357, 0.282]
    assert all(1 <= a.corrected <= a.K + 1 for a in published().acceptance)


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("mlperf, 2 GPU(s), ttft_p95_s: 6.18 → 6.75", "-8.4%"),
        ("mlperf, 1 GPU(s): percentages of itl_p95_ms and tpot_p95_ms", "itl_p95_ms +3.8%, tpot_p95_ms +7.1%"),
        ("concurrency 200 with 100 prompts", "100 requests"),
        ("acceptance length 0.91 at K = 1", "1 + accepted / drafts is 1.91"),
        ("swe-bench, baseline: 4.41 per 1M", "per GPU it is 0.55"),
        ("swe-bench, head: 3.56 per 1M", "per GPU it is 0.44"),
        ("sharegpt, 1 GPU(s), ttft_p95_s: +12.1%", "unresolved"),
        ("--speculative-decoding eagle3", "--speculative-config"),
        ("fixed tuning rules", "falls with K by construction"),
    ],
)
def test_published_errors_are_flagged(what, why):
    assert [e for e in find_errata() if what in e.what and why in e.why]


def test_a_sound_figure_is_not_flagged():
    flagged = " ".join(e.what for e in find_errata())
    assert "output_tokens_per_s" not in flagged
    assert "concurrency 100 " not in flagged


def test_a_workload_of_the_same_name_stands_beside_the_published_one(tmp_path):
    recipe = tiny_recipe(tmp_path)
    write_results(recipe, head_speed={1: 1.5, 8: 1.2}, workloads=("mlperf", "mine"))
    levels = summarise_serving(read_serving(recipe.results_dir / "serving"))
    table = published_table(levels)
    rows = {(row[0].text, row[1].text): row for row in table.rows}
    assert len(rows) == 12  # one and two GPUs, six measures each
    worse = rows["redhat: mlperf, 2 GPU(s), K = 3", "ttft_p95_s"]
    assert (worse[4].text, worse[4].tone) == ("-8.4", "unresolved")  # not +9.3, and not told from noise
    assert rows["redhat: mlperf, 1 GPU(s), K = 3", "output_tokens_per_s"][5].text.startswith("Output throughput: +3")
    assert published_table([level for level in levels if level.workload == "mine"]) is None
