"""Loads with a request rate beside those of fixed concurrency: shown, never judged."""

import pandas as pd
import pytest

from drafthead.evaluation.decision.analysis import analyse, read_results
from drafthead.evaluation.reporting.report import print_report
from drafthead.evaluation.reporting.serving_tables import serving_tables
from drafthead.evaluation.results.one_file import Results
from tests.evaluation.rows import write_results
from tests.recipes import tiny_recipe


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> Results:
    """Faster at 1 and 8 at once; slower at a rate capped at 8, and along a ramp without a cap."""
    recipe = tiny_recipe(tmp_path_factory.mktemp("rates"))
    write_results(recipe, head_speed={1: 1.3, 8: 1.3, 9: 0.7, 10: 0.7}, prompts=64, lengths=(3,))
    found = read_results(recipe)
    for frame in (found.requests, found.runs):
        frame["load"] = "c" + frame["concurrency"].astype(str)
        frame["load"] = frame["load"].replace({"c9": "r4-c8", "c10": "r2to8linear"})
        frame["concurrency"] = frame["concurrency"].replace({9: 8, 10: 0})
    return found


def test_the_verdict_is_by_requests_in_flight(results, capsys):
    analysis = analyse(results)
    (verdict,) = analysis.verdicts
    assert (verdict.decision, [v.concurrency for v in verdict.levels]) == ("DEPLOY", [1, 8])
    assert {level.load for level in analysis.levels} == {"c1", "c8", "r4-c8", "r2to8linear"}
    assert {level.load for level in analysis.main_levels} == {"c1", "c8"}
    measures, means, _ = serving_tables(analysis.levels)
    assert measures.columns[1] == "Load"
    assert "the verdict leaves such loads out" in measures.note
    assert means.rows[0][-1].text == "2 / 0 of 2"
    print_report(results.recipe, analysis)
    assert "concurrency 0" not in capsys.readouterr().out


def test_rates_alone_give_no_verdict(results):
    only = [frame[frame["load"].str.startswith("r")] for frame in (results.requests, results.runs)]
    rates = Results(results.recipe, results.manifests, results.acceptance, *map(pd.DataFrame, only))
    with pytest.raises(ValueError, match=r"request rate \(r2to8linear, r4-c8\).*add some with eval.concurrency"):
        analyse(rates)
