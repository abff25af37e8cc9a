"""A schedule beside fixed draft lengths, on rows in which it drafts as the best length does at every load."""

import pandas as pd
import pytest

from drafthead.evaluation.reporting.schedule_check import (
    SCHEDULED,
    check_schedule,
    compare,
    measure_schedule,
    modelled_schedule,
    settled,
)
from drafthead.evaluation.results.levels import THROUGHPUT, Level, summarise_serving
from drafthead.evaluation.results.serving_rows import ServingRows, read_serving
from tests.evaluation.rows import write_results
from tests.recipes import tiny_recipe


@pytest.fixture(scope="module")
def levels(tmp_path_factory) -> list[Level]:
    """K = 3 is best at 1, K = 1 at 32; the schedule is a copy of either."""
    recipe = tiny_recipe(tmp_path_factory.mktemp("schedule"))
    write_results(recipe, head_speed={1: 1.5, 32: 0.6}, prompts=96, lengths=(1, 3))
    return summarise_serving(ServingRows(*map(_with_schedule, read_serving(recipe.results_dir / "serving"))))


def _with_schedule(rows: pd.DataFrame) -> pd.DataFrame:
    copied = rows[((rows["concurrency"] == 1) & (rows["k"] == 3)) | ((rows["concurrency"] == 32) & (rows["k"] == 1))]
    return pd.concat([rows, copied.assign(arm=SCHEDULED, k=3)], ignore_index=True)


def test_it_gains_what_the_best_fixed_length_loses_elsewhere(levels):
    check = compare(levels, {1: 0.5, 32: 0.5})
    speed = {(x.method, x.K, x.concurrency): 1 + x.change(THROUGHPUT) for x in levels}
    mix = {K: 1 / (0.5 / speed["eagle3", K, 1] + 0.5 / speed["eagle3", K, 32]) for K in (1, 3)}
    both = 1 / (0.5 / speed["eagle3", 3, 1] + 0.5 / speed["eagle3", 1, 32])
    assert check.best == 1 == max(mix, key=mix.__getitem__)
    assert check.change.interval.value == pytest.approx(both / mix[1] - 1)
    assert check.change.resolved
    assert [row[0].text for row in check.table.rows] == ["1", "32", "the traffic"]
    assert [row[5].text for row in check.table.rows] == ["K = 3", "K = 1", "K = 1"]
    assert [row[6].text.split()[0] for row in check.table.rows[:2]] == [
        "+0.0",
        "+0.0",
    ]  # it copies one


def test_blocks_are_compared_apart(tmp_path):
    recipe = tiny_recipe(tmp_path)
    write_results(recipe, head_speed={1: 1.5, 32: 0.6}, prompts=96, lengths=(1, 3))
    directory = recipe.results_dir / "serving"
    for path in sorted(directory.glob("*.parquet")):
        rows = _with_schedule(pd.read_parquet(path))
        pd.concat([rows, rows.assign(block=1)]).to_parquet(path)
    check = check_schedule(recipe, directory)
    assert check.by_block == pytest.approx((check.change.interval.value,) * 2)


def test_traffic_of_one_load_leaves_nothing_to_gain(levels):
    check = compare(levels, {32: 1.0})
    assert (check.best, check.change.interval.value) == (1, 0)
    assert not check.change.resolved


def test_what_leaves_no_choice_is_refused(tmp_path):
    recipe = tiny_recipe(tmp_path, "eval.num_draft_tokens=3")
    with pytest.raises(ValueError, match=r"num_draft_tokens \[3\].*eval.concurrency \[1, 8\]"):
        modelled_schedule(recipe)
    with pytest.raises(ValueError, match="draft length"):
        measure_schedule(recipe, [[1, 64, 3]])
    with pytest.raises(ValueError, match="none may be above 3"):
        measure_schedule(recipe, [[1, 2, 4], [3, 64, 1]])


def test_one_draft_length_for_every_load_needs_no_measurement(tmp_path):
    recipe = tiny_recipe(tmp_path)
    assert settled(recipe, [[1, 2, 3], [3, 64, 1]]) == ""
    assert '"num_speculative_tokens":3' in settled(recipe, [[1, 64, 3]])
    never = settled(recipe, [[1, 64, 0]])
    assert never
    assert "num_speculative_tokens" not in never
