"""Before any head exists: what it would need, and what it would bring."""

from dataclasses import replace

import pytest

from drafthead.artifacts import ArtifactError
from drafthead.evaluation.decision.cost_model import fit
from drafthead.evaluation.reporting.decision_tables import (
    CAN,
    CANNOT,
    DEPENDS,
    assumed_lengths,
    even_curve,
    judge_training,
    plan_tables,
    rows_to_plan_from,
    worth,
)
from tests.evaluation.machine import Machine, dense
from tests.evaluation.rows import write_results
from tests.recipes import tiny_recipe

SHARES = {1: 0.5, 50: 0.5}


@pytest.fixture(scope="module")
def model():
    return fit(Machine(dense).points())


def test_one_length_fixes_the_curve():
    curve = even_curve(1 + 0.5 + 0.25, K=2, longest=4)
    assert [curve[k] for k in range(1, 5)] == pytest.approx([1.5, 1.75, 1.875, 1.9375])
    assert even_curve(1.0, 3, 3)[3] == pytest.approx(1.0)
    assert even_curve(4.0, 3, 3)[2] == pytest.approx(3.0)
    with pytest.raises(ValueError, match="4.5 at K = 3"):
        even_curve(4.5, 3, 3)


def test_more_acceptance_is_worth_more_and_drafting_is_never_forced(model):
    weak, strong = (worth(model, length, 3, SHARES, 256) for length in (1.05, 2.7))
    assert 0.95 < weak.speedup < 1.02  # the schedule falls back to few drafts or none
    assert strong.speedup > 1.4
    assert strong.loads[1][0] >= strong.loads[50][0]


def test_training_is_judged_by_the_whole_range(model):
    model = replace(model, held_out=())  # without an error that widens it
    weak, strong = (worth(model, length, 3, SHARES, 256) for length in (1.05, 2.7))
    assert judge_training(model, [strong])[0] == CAN
    assert judge_training(model, [weak, strong])[0] == DEPENDS
    assert judge_training(model, [weak])[0] == CANNOT


def test_a_plan_can_be_made_from_an_earlier_heads_measurement(tmp_path):
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(ArtifactError, match="python eval/plan.py"):
        rows_to_plan_from(recipe)
    write_results(recipe, head_speed={1: 1.5, 8: 1.2, 32: 0.8}, lengths=(1, 3))
    rows = rows_to_plan_from(recipe)
    plan = plan_tables(recipe, rows, [1.5, 3.5])
    needed, brought = plan.tables
    # The rows were made with r(c, 3) = 2.4 / speed.
    assert [float(row[3].text) for row in needed.rows[:3]] == pytest.approx([1.6, 2.0, 3.0], rel=0.05)
    assert [row[3].tone for row in needed.rows[:3]] == ["unresolved"] * 3
    assert len(brought.rows) == 4
    assert plan.verdict in (CAN, DEPENDS)
    assert assumed_lengths(recipe, None) == [1.92, 2.68]  # public heads at K = 3
    longer = tiny_recipe(tmp_path, "eval.num_draft_tokens=5", "head.num_ttt_steps=5")
    with pytest.raises(ValueError, match="--acceptance-length"):
        assumed_lengths(longer, None)
