"""Loads with a request rate beside those of fixed concurrency: shown, never judged."""

import numpy as np
import pytest

from drafthead.config import Recipe
from drafthead.evaluation.decision.analysis import analyse
from drafthead.evaluation.reporting.measured_tables import levels_table, means_table
from drafthead.evaluation.reporting.report import build_report, print_brief
from drafthead.evaluation.reporting.tables import note
from drafthead.evaluation.results.levels import ServingRows
from tests.evaluation.rows import NAMES, each, served, slower, together
from tests.recipes import tiny_recipe


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> tuple[Recipe, ServingRows]:
    """Faster at 1 and 8 at once; slower at a rate capped at 8, and at one without a cap."""
    recipe = tiny_recipe(tmp_path_factory.mktemp("rates"))
    rows = served(recipe, head_speed={1: 1.3, 8: 1.3, 9: 0.7, 10: 0.7}, prompts=64)
    for frame in rows:
        frame["load"] = frame["load"].replace({"c9": "r4-c8", "c10": "r16"})
        frame["request_rate"] = frame["concurrency"].map({9: 4.0, 10: 16.0}).fillna(np.inf)
        frame["concurrency"] = frame["concurrency"].replace({9: 8, 10: 0})
    return recipe, rows


def test_the_verdict_is_by_requests_in_flight(measured, capsys):
    analysis = analyse(*measured)
    (verdict,) = analysis.verdicts
    assert (verdict.decision, [v.concurrency for v in verdict.levels]) == ("DEPLOY", [1, 8])
    assert {level.key.load.name for level in analysis.levels} == {"c1", "c8", "r4-c8", "r16"}
    assert {level.key.load.name for level in analysis.levels_of(analysis.main)} == {"c1", "c8"}
    measures, means = levels_table("Every load", analysis.levels, NAMES), means_table(analysis.levels, NAMES)
    assert {row[1].text for row in measures.rows} == {"1", "8", "r4-c8", "r16"}
    assert "the verdict leaves such loads out" in measures.note
    assert means.rows[0][3].tone == "better"  # at both loads of fixed concurrency
    print_brief(measured[0], analysis)
    assert "r16" not in capsys.readouterr().out


def test_drafts_that_were_accepted_whatever_they_were_give_no_verdict(tmp_path):
    extra = "{rejection_sample_method: synthetic, synthetic_acceptance_length: 3}"
    recipe = tiny_recipe(tmp_path, f"eval.methods=[{{name: head, method: head, extra: {extra}}}]")
    rows = served(recipe, head_speed={1: 1.3})
    with pytest.raises(ValueError, match="accepted drafts whatever they were"):
        analyse(recipe, rows)


def test_rates_alone_give_no_verdict(measured):
    recipe, rows = measured
    rates = ServingRows(*(frame[frame["load"].str.startswith("r")] for frame in rows))
    with pytest.raises(ValueError, match=r"request rate \(r16, r4-c8\).*add some with eval.concurrency"):
        analyse(recipe, rates)


@pytest.mark.parametrize("fault", ["no shared prompt", "one chunk", "one token at 1", "one token"])
def test_a_report_is_made_of_whatever_was_answered(tmp_path, fault):
    recipe = tiny_recipe(tmp_path)
    requests, runs = served(recipe, head_speed={1: 1.3, 8: 1.2}, prompts=48)
    head = requests["method"] == "head"
    if fault == "no shared prompt":  # at 1 the baseline answered the first half, the head the second
        requests.loc[(requests["concurrency"] == 1) & (head == (requests["prompt_id"] < "p024")), "error"] = "500"
        runs.loc[runs["concurrency"] == 1, "failed"] = 24
    elif fault.startswith("one token"):
        short = requests["concurrency"] <= (1 if fault.endswith("1") else 8)
        requests.loc[short, ["output_tokens", "tpot_s", "itl_s"]] = [1, np.nan, np.nan]
    else:  # of a server that streams nothing
        requests.loc[head, ["tpot_s", "itl_s"]] = 0.0
    analysis = analyse(recipe, ServingRows(requests, runs))
    assert {v.concurrency: v.decision for v in analysis.main.levels}[8] == "DEPLOY"
    assert build_report(recipe, analysis).headline == analysis.main.headline


def test_every_workload_has_a_verdict_and_all_prompts_decide(tmp_path):
    """Faster everywhere, but on `other`, which is no part of `all`: they stand side by side, and `all` is advised."""
    recipe = tiny_recipe(tmp_path)
    rows = served(recipe, head_speed={1: 1.3, 8: 1.2}, prompts=48, workloads=("all", "code", "other"))
    other = "workload == 'other' and method == 'head'"
    analysis = analyse(
        recipe,
        together(each(rows, lambda f: f.query(f"not ({other})")), each(rows, lambda f: slower(f.query(other), 2))),
    )
    assert {v.key.workload: v.decision for v in analysis.verdicts} == {
        "all": "DEPLOY", "code": "DEPLOY", "other": "DO NOT DEPLOY",
    }  # fmt: skip
    assert analysis.main.key.workload == "all"
    section = build_report(recipe, analysis).sections[0]
    assert section.title == "Workloads"
    every, throughput, length, ttft = section.tables
    assert [row[0].text for row in every.rows] == ["all", "code", "other"]
    assert [(row[0].text, row[1].tone) for row in throughput.rows] == [
        ("all", "better"), ("code", "better"), ("other", "worse"),
    ]  # fmt: skip
    assert len(length.rows) == len(ttft.rows) == 3
    assert (length.note, throughput.note) == (note("loops"), "")
