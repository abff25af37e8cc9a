"""The sequential test: how often it raises a false alarm, how soon it sees a fall, and what it says has changed."""

import numpy as np
import pytest

from drafthead.adapting.drift import ALL, charts_of, first_alarm, make_chart, token_distance, what_changed
from tests.adapting.records import requests


def columns(rows):
    return np.array([r["drafts"] for r in rows], float), np.array([r["accepted"] for r in rows], float)


def test_a_steady_month_raises_at_most_one_false_alarm():
    """60 months of 3,000 requests, each with a reference of its own: one alarm a month is allowed on average."""
    alarms, month, reference = 0, 3000, 200
    for seed in range(60):
        drafts, accepted = columns(requests(reference + month, 0.58, seed=seed))
        chart = make_chart(drafts[:reference], accepted[:reference], month)
        rest = drafts[reference:], accepted[reference:]
        while (places := chart.alarm(*rest)) is not None:
            alarms += 1
            rest = rest[0][places[0] + 1 :], rest[1][places[0] + 1 :]
    assert alarms <= 60
    assert alarms > 0  # or the threshold would be far too high


def test_a_fall_is_seen_within_some_dozens_of_requests():
    drafts, accepted = columns(requests(200, 0.58))
    chart = make_chart(drafts, accepted, 300_000)
    alarms_at = [chart.alarm(*columns(requests(2000, 0.45, seed=seed))) for seed in range(1, 20)]
    assert np.median([seen for seen, _ in alarms_at]) < 100
    assert chart.alarm(*columns(requests(2000, 0.62, seed=3))) is None


def test_one_response_that_loops_raises_no_alarm():
    rows = requests(300, 0.58)
    chart = make_chart(*columns(rows[:200]), 300_000)
    looping = rows[200] | {"drafts": 190, "accepted": 20}
    assert chart.alarm(*columns([*rows[200:250], looping, *rows[250:]])) is None


def test_the_alarm_says_where_the_fall_began():
    drafts, accepted = columns(requests(200, 0.58))
    chart = make_chart(drafts, accepted, 300_000)
    seen, began = chart.alarm(*columns([*requests(300, 0.6, seed=1), *requests(200, 0.4, seed=2)]))
    assert 300 <= seen < 380
    assert 290 <= began < 305


def test_a_fall_of_one_workload_is_named_where_the_others_hide_it():
    steady, other = requests(1700, 0.58, workload="chat"), requests(150, 0.58, workload="code", seed=1)
    charts = charts_of([*steady[:400], *other])
    assert set(charts) == {ALL, "chat", "code"}
    slower = charts_of([row | {"at": 10 * row["at"]} for row in [*steady[:400], *other]])
    assert all(slower[name].threshold < charts[name].threshold for name in charts)  # fewer requests in thirty days
    fallen = requests(150, 0.40, workload="code", seed=2)
    mixed = [r for i, row in enumerate(steady[400:]) for r in ([row, fallen[i // 9]] if i % 9 == 0 else [row])]
    alarm = first_alarm(charts, mixed)
    assert alarm.workload == "code"
    assert first_alarm(charts, [r for r in mixed if r["workload"] == "chat"]) is None


def test_a_workload_of_constant_acceptance_has_no_chart():
    steady = requests(200, 0.58)
    constant = [row | {"workload": "code", "accepted": 3 * row["drafts"]} for row in requests(100, 0.5, seed=1)]
    assert set(charts_of([*steady, *constant])) == {ALL, "chat"}
    assert not charts_of(constant)


def test_what_changed_shows_shares_lengths_and_acceptance_of_each_workload():
    before, now = requests(100, 0.6), [*requests(40, 0.6, seed=1), *requests(60, 0.4, workload="code", seed=2)]
    rows = {row["workload"]: row for row in what_changed(before, now)}
    assert rows["chat"]["requests"] == [100, 40]
    assert rows["code"]["requests"] == [None, 60]
    assert rows["code"]["acceptance_length"][0] is None
    assert rows[ALL]["acceptance_length"][1] < rows[ALL]["acceptance_length"][0]


def test_the_distance_of_tokens_is_in_bits():
    assert token_distance([[1, 2]], [[2, 1], [1, 2]]) == 0
    assert token_distance([[1, 2]], [[3, 4]]) == 1
    assert token_distance([[1, 1, 2, 2]], [[1, 1, 1, 1]]) == pytest.approx(0.558, abs=0.001)
    assert token_distance([], [[3]]) is None
