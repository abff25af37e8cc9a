"""Conditions beside each other, from rows that can be counted by hand."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from drafthead.evaluation.reporting.figures import acceptance_pictures
from drafthead.evaluation.reporting.heads import comparison_table
from drafthead.evaluation.reporting.measured_tables import acceptance_table, conditions_table
from drafthead.evaluation.reporting.report import acceptance_line
from drafthead.evaluation.results.summary import AcceptanceSummary, summarise_conditions
from tests.evaluation.rows import NAMES


def _row(
    method: str, k: int, prompt: str, steps: list[tuple[int, int]], sha: str = "same", repeated: float = 0.0
) -> dict:
    """One prompt whose steps are (proposed, accepted)."""
    kept, drafted = np.array([a for _, a in steps], int), np.array([p for p, _ in steps], int)
    return {
        "method": method, "again": False, "k": k, "temperature": 0.0, "effort": "low", "prompt_id": prompt,
        "category": "chat",
        "drafts": len(steps), "proposed": drafted.sum(), "accepted": kept.sum(), "output_sha256": sha,
        "accepted_at": [(kept > i).sum() for i in range(k)],
        "reached_at": [((kept >= i) & (drafted > i)).sum() for i in range(k)],
        "repeated": repeated, "num_tokens": 100,
    }  # fmt: skip


@pytest.fixture
def rows() -> pd.DataFrame:
    baseline = [_row("none", 0, p, [], repeated=r) for p, r in (("a", 0), ("b", 0), ("loops", 0.5))]
    drafted = [
        # Two steps propose one token only: what they did not propose is not counted against them.
        _row("head", 2, "a", [(2, 2), (2, 0), (1, 1)]),
        _row("head", 2, "b", [(2, 1), (1, 1)], sha="other"),
        _row("head", 2, "loops", [(2, 2)] * 9),
    ]
    return pd.DataFrame([*baseline, *drafted])


@pytest.fixture
def summaries(rows):
    return summarise_conditions(rows)


def test_sampled_responses_are_not_compared_with_those_of_the_baseline(rows):
    assert conditions_table(summarise_conditions(rows.assign(temperature=0.7)), NAMES).rows[0][-1].text == "–"


def test_counts_are_pooled_and_looping_prompts_left_out(summaries):
    everything = summaries[0]
    assert (everything.category, everything.prompts) == ("all", 2)
    assert everything.length.value == pytest.approx(1 + 5 / 5)
    assert everything.rate == pytest.approx(5 / 8)
    assert everything.unconditional == pytest.approx([4 / 5, 1 / 5])
    assert everything.conditional == pytest.approx([4 / 5, 1 / 2])  # two drafts had a second token to lose
    assert everything.identical.value == pytest.approx(2 / 3)  # the looping prompt counts here


def test_a_length_of_too_few_prompts_is_marked(summaries):
    cell = conditions_table(summaries, NAMES).rows[0][6]
    assert (cell.tone, cell.text.endswith("(n = 2, too few)")) == ("unresolved", True)
    assert "n = 2, " in acceptance_line(AcceptanceSummary(0.0, 3, 1, 1.0, summaries, {}), NAMES)


def test_a_picture_names_how_few_the_prompts_are(summaries, monkeypatch):
    labels, savefig = [], Figure.savefig

    def noted(figure, *args, **options):
        labels.append([label.get_text() for label in figure.axes[0].get_yticklabels()])
        savefig(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", noted)
    many = [replace(summary, prompts=16) for summary in summaries]
    for methods in (summaries, many):
        acceptance_pictures(AcceptanceSummary(0.0, 3, 1, 1.0, methods, {}), NAMES)
    assert labels[0] == ["all (n = 2)", "chat (n = 2)"]
    assert labels[2] == ["all", "chat"]


@pytest.mark.parametrize(("accepted", "prompts", "told"), [(0, 16, True), (1, 16, False), (0, 15, False)])
def test_a_head_that_is_hardly_accepted_is_explained(accepted, prompts, told):
    names = [f"p{i}" for i in range(prompts)]
    rows = [_row("none", 0, p, []) for p in names] + [_row("head", 2, p, [(2, accepted)] * 4) for p in names]
    summary = AcceptanceSummary(0.0, prompts, 0, 1.0, summarise_conditions(pd.DataFrame(rows)), {})
    for text in (acceptance_line(summary, NAMES), acceptance_table(summary, NAMES).note):
        assert ("head: hardly a draft is accepted" in text and "--layer-ids-are" in text) == told


def test_tables_name_the_condition(summaries):
    row = [cell.text for cell in conditions_table(summaries, NAMES).rows[0]]
    assert row[:6] == ["all", "EAGLE-3 head", "2", "0", "low", "2"]
    assert row[-3:-1] == ["80.0 20.0", "80.0 50.0"]
    assert [row[0].text for row in conditions_table(summaries, NAMES).rows] == ["all", "chat"]


def test_heads_are_compared_on_the_prompts_that_both_answered():
    """Data of its own may have other prompts, and a prompt may loop in one of them only."""
    counted = {"first": {"a": 1, "b": 2, "only here": 9}, "other": {"b": 4, "a": 5}, "elsewhere": {"z": 1}}
    rows = [
        {"kind": kind, "prompt": prompt, "accepted": accepted, "drafts": 2, "k": 3, "seed": seed, "layers": 1,
         "how": "served", "control": False, "parameters": 10**6,
         "seconds": 60 * (1 + seed)}
        for kind, prompts in counted.items() for seed in (0, 1) for prompt, accepted in prompts.items()
    ]  # fmt: skip
    table = comparison_table(pd.DataFrame(rows))
    lines = {row[0].text: dict(zip(table.frame, (cell.text for cell in row), strict=True)) for row in table.rows}
    change = 100 * ((1 + 9 / 4) / (1 + 3 / 4) - 1)
    assert lines["other"]["change, %, K = 3"] == f"{change:+.1f}, no interval"  # of two prompts
    assert lines["elsewhere"]["change, %, K = 3"] == "–"
    assert lines["first"]["seeds, K = 3"] == "3.00 to 3.00"
    assert lines["first"]["training (min)"] == "1.5"
