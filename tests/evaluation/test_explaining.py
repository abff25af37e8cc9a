"""Why served and predicted acceptance differ: the gap is split into its parts."""

from drafthead.drafters.replay import Acceptance
from drafthead.evaluation.reporting.explaining import (
    HELDOUT,
    VALIDATION,
    Compared,
    explain_gap,
    first_difference,
    gap_table,
)
from eval import explain
from tests.artifacts import write_prompt_artifact
from tests.recipes import tiny_recipe


def _row(split, name, predicted, served, differs_at=None):
    return Compared(name, "chat", split, Acceptance(10, predicted), Acceptance(10, served), differs_at)


def test_the_gap_is_split_into_prompts_and_serving():
    rows = [
        _row(VALIDATION, "a", (9, 6), (9, 6)),
        _row(VALIDATION, "b", (9, 6), (9, 6)),
        _row(HELDOUT, "c", (8, 4), (8, 4)),
        _row(HELDOUT, "d", (8, 4), (7, 3), differs_at=5),
    ]
    whole, prompts, serving, first, same = explain_gap(rows)
    assert "2.500" in whole
    assert "-0.400" in whole  # served 2.1
    assert "-0.300" in prompts
    assert "-0.100" in serving
    assert "d (chat, held out)" in first
    assert "number 5" in first
    assert same.startswith("3 of 4")
    table = gap_table(rows)
    assert [row[0].text for row in table.rows] == [VALIDATION] * 2 + [HELDOUT] * 2
    assert [cell.text for cell in table.rows[2][6:]] == ["80.00 | 75.00", "40.00 | 35.00"]


def test_where_responses_part():
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 4, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_responses_that_go_on_for_another_k_are_not_taken_again(tmp_path, monkeypatch):
    made_from = []
    monkeypatch.setattr(explain, "begin", lambda _directory, _kind, identity, **_: made_from.append(identity) or True)
    write_prompt_artifact(tiny_recipe(tmp_path))
    for k in (1, 1, 3):
        explain.heldout_states(tiny_recipe(tmp_path, f"eval.num_draft_tokens={k}"), 64)
    assert [identity == made_from[0] for identity in made_from] == [True, True, False]
