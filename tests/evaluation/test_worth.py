"""Before any head exists: what it would need, and what it would bring."""

import pytest

from drafthead.artifacts import ArtifactError
from drafthead.evaluation.reporting.decision_tables import (
    CAN,
    CANNOT,
    DEPENDS,
    assumed_lengths,
    plan_tables,
    rows_to_plan_from,
)
from tests.evaluation.rows import write_results
from tests.recipes import tiny_recipe


def test_a_plan_can_be_made_from_an_earlier_heads_measurement(tmp_path):
    recipe = tiny_recipe(tmp_path, "eval.concurrency=[1,64,90]")  # its servers have 90 places, not engine.max_num_seqs
    with pytest.raises(ArtifactError, match="python eval/plan.py"):
        rows_to_plan_from(recipe)
    write_results(recipe, head_speed={1: 1.5, 64: 1.2, 90: 0.8}, lengths=(1, 3))
    # Not what today's recipe says: its servers would have 64.
    rows, places = rows_to_plan_from(tiny_recipe(tmp_path, "eval.concurrency=[1,64]"))
    assert places == 90
    with pytest.raises(ArtifactError, match="dtype: found 'float32', wanted 'bfloat16'"):
        rows_to_plan_from(tiny_recipe(tmp_path, "target.dtype=bfloat16"))
    (needed, brought), verdict = plan_tables(recipe, rows, places, [1.5, 3.5])
    # The rows were made with r(c, 3) = 2.4 / speed.
    assert [float(row[3].text) for row in needed.rows[:3]] == pytest.approx([1.6, 2.0, 3.0], rel=0.05)
    assert [row[3].tone for row in needed.rows[:3]] == ["unresolved"] * 3
    weak, strong = ([float(row[column].text) for row in brought.rows] for column in (1, 2))
    assert weak == [0.0] * 4  # below every break-even: served without drafts
    gains = [1 + gain / 100 for gain in strong]
    assert gains[:3] == pytest.approx([3.5 / 1.6, 3.5 / 2.0, 3.5 / 3.0], rel=0.05)
    assert gains[3] == pytest.approx(3 / sum(1 / gain for gain in gains[:3]), rel=1e-3)
    assert verdict.startswith(DEPENDS)
    assert plan_tables(recipe, rows, places, [3.4, 3.5])[1].startswith(CAN)
    assert plan_tables(recipe, rows, places, [1.05, 1.1])[1].startswith(CANNOT)
    assert assumed_lengths(recipe, None) == [1.92, 2.68]  # public heads at K = 3
    with pytest.raises(ValueError, match="4.5: at K = 3 it lies between 1 and 4"):
        assumed_lengths(recipe, [2.0, 4.5])
    longer = tiny_recipe(tmp_path, "eval.num_draft_tokens=5", "head.num_ttt_steps=5")
    with pytest.raises(ValueError, match="--acceptance-length"):
        assumed_lengths(longer, None)
