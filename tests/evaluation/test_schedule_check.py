"""A schedule beside fixed draft lengths, on rows in which it drafts as the best length does at every load."""

from typing import Any

import pytest

from drafthead.evaluation.decision import variants
from drafthead.evaluation.decision.analysis import compare_schedule
from drafthead.evaluation.decision.variants import (
    SCHEDULED,
    given_schedule,
    measure_schedule,
    modelled_schedule,
    scheduled,
)
from drafthead.evaluation.results.levels import THROUGHPUT, LoadComparison, ServingRows, summarise_serving
from drafthead.evaluation.workload import speculative_config
from tests.evaluation.rows import JUDGED, each, served, together
from tests.recipes import tiny_recipe
from tests.scripts import run_here

SCHEDULE = [[1, 8, 3], [9, 64, 1]]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> ServingRows:
    """K = 3 is best at 1, K = 1 at 32."""
    recipe = tiny_recipe(tmp_path_factory.mktemp("schedule"))
    return served(recipe, head_speed={1: 1.5, 32: 0.8}, prompts=96, lengths=(1, 3))


def _levels(rows: ServingRows, lengths: dict[int, int]) -> list[LoadComparison]:
    """With a schedule that is a copy of these lengths: load -> K."""
    copied = each(rows, lambda f: f[f["k"] == f["concurrency"].map(lengths)].assign(method=SCHEDULED, k=3))
    return summarise_serving(together(rows, copied), JUDGED)


def test_it_gains_what_the_best_fixed_length_loses_elsewhere(tmp_path, rows):
    levels = _levels(rows, {1: 3, 32: 1})
    recipe = tiny_recipe(tmp_path, "eval.traffic.workload=code")  # measured are all prompts, whatever the traffic's
    schedule = compare_schedule(recipe, SCHEDULE, levels)
    speed = {(x.key.method, x.key.K, x.key.concurrency): 1 + x.change(THROUGHPUT) for x in levels}
    mix = {K: 1 / (0.5 / speed["head", K, 1] + 0.5 / speed["head", K, 32]) for K in (1, 3)}
    both = 1 / (0.5 / speed["head", 3, 1] + 0.5 / speed["head", 1, 32])
    assert schedule.against == 1 == max(mix, key=mix.__getitem__)
    assert schedule.change.value == pytest.approx(both / mix[1] - 1)
    assert (schedule.change.resolved, schedule.rejection_reason) == (True, "")
    by_load = [speed["head", 3, 1] / speed["head", 1, 1] - 1, 0]
    assert [change.value for change in schedule.by_load.values()] == pytest.approx(by_load)
    config = speculative_config(recipe, SCHEDULED, 3, (scheduled(recipe, SCHEDULE),))
    assert (config["num_speculative_tokens"], config["num_speculative_tokens_per_batch_size"]) == (3, SCHEDULE)


@pytest.mark.parametrize(
    ("lengths", "schedule", "doubt"),
    [
        ({1: 1, 32: 1}, SCHEDULE, "no resolved gain"),  # as fast as K = 1 everywhere
        ({1: 1, 32: 3}, SCHEDULE, "no resolved gain"),  # slower at 32
        ({1: 3, 32: 1}, [[1, 8, 3], [9, 16, 0], [17, 64, 1]], "9 to 16"),  # nobody served 9 to 16 requests
    ],
)
def test_a_schedule_that_does_not_gain_or_was_not_served_is_not_advised(tmp_path, rows, lengths, schedule, doubt):
    found = compare_schedule(tiny_recipe(tmp_path), schedule, _levels(rows, lengths))
    assert doubt in found.rejection_reason


def test_a_gain_that_collapses_at_one_load_is_not_advised(tmp_path, rows):
    """As vLLM issue 49548 reports around a threshold to K = 0."""
    levels = _levels(rows, {1: 3, 32: 3})
    shares = ("eval.traffic.concurrency.1=0.98", "eval.traffic.concurrency.32=0.02")
    K1 = [level for level in levels if (level.key.method, level.key.K) != ("head", 3)]
    found = compare_schedule(tiny_recipe(tmp_path, *shares), SCHEDULE, K1)
    assert found.change.low > 0
    assert "concurrency 32" in found.rejection_reason


def test_it_is_served_beside_every_fixed_length_without_servers_of_others(tmp_path, monkeypatch):
    def stop(recipe, plan, directory):
        assert {(run.method, run.k) for run in plan.runs} == {
            ("none", 0), ("head", 3), ("head", 1), (SCHEDULED, 3),
        }  # fmt: skip
        assert not any(run.endpoint for run in plan.runs)
        raise KeyboardInterrupt

    monkeypatch.setattr(variants, "measure_serving", stop)
    other = "eval.endpoints=[{name: other, url: 'http://localhost:1', model: m}]"
    with pytest.raises(KeyboardInterrupt):
        measure_schedule(tiny_recipe(tmp_path, "eval.num_draft_tokens=[3,1]", other), SCHEDULE)


@pytest.mark.parametrize(("K", "pays"), [(1, True), (3, False)])
def test_a_length_that_loses_everywhere_is_not_to_be_served(tmp_path, monkeypatch, capsys, K, pays):
    """Faster than no speculation at K = 1, slower at K = 3, of which the model has made its choice."""
    settings = (f"output_dir={tmp_path}", "eval.num_draft_tokens=[3,1]", "eval.concurrency=[1,4]")
    both = served(tiny_recipe(tmp_path), head_speed={1: 0.9, 4: 0.9}, prompts=96, lengths=(1, 3))
    levels = summarise_serving(both, JUDGED)
    monkeypatch.setattr("drafthead.evaluation.decision.variants.modelled_schedule", lambda _: ([[1, 64, K]], levels))
    assert run_here("eval/draft_lengths.py", *settings) == 0
    printed = capsys.readouterr().out
    assert f"K = {K} at every load" in printed
    assert ("--speculative-config" in printed) == pays
    assert ("DO NOT DEPLOY" in printed) == (not pays)


def test_nothing_is_served_that_compares_nothing(tmp_path):
    with pytest.raises(ValueError, match="eval.num_draft_tokens"):
        modelled_schedule(tiny_recipe(tmp_path))
    overlap, late, backwards = [[1, 4, 3], [4, 64, 1]], [[2, 4, 3], [5, 64, 1]], [[4, 1, 3], [5, 64, 1]]
    unreadable: tuple[Any, ...] = ([], 3, [[1, 2], [3, 64]], [[1, 2, None], [3, 64, 1]], {"1": 2})
    for schedule in ([[1, 64, 3]], [[1, 2, 9], [3, 64, 1]], overlap, late, backwards, *unreadable):
        with pytest.raises(ValueError, match="--schedule"):
            given_schedule(tiny_recipe(tmp_path, "eval.num_draft_tokens=[3,1]"), schedule)
    shuffled = [[*entry] for entry in reversed(SCHEDULE)]
    assert given_schedule(tiny_recipe(tmp_path, "eval.num_draft_tokens=[3,1]"), shuffled) == SCHEDULE
