"""The loop's decisions, on requests written down beforehand; its stages and its server have a test of their own."""

import json
import shutil
import time
from types import SimpleNamespace

import pandas as pd
import pytest

from drafthead.adapting import drift
from drafthead.adapting.capture import Log
from drafthead.adapting.control import folder
from drafthead.adapting.endpoint import MIXED
from drafthead.adapting.history import write_history
from drafthead.adapting.loop import SERVED, Head, Loop, in_memory, run_loop
from drafthead.artifacts import begin, finish
from drafthead.config import load_recipe
from drafthead.config.evaluation import HEAD
from drafthead.evaluation.columns import ACCEPTANCE_COLUMNS, write_rows
from tests.adapting.records import captured, requests, write
from tests.recipes import tiny_recipe

NOW = time.time() - 5000


@pytest.fixture
def loop(tmp_path, monkeypatch):
    monkeypatch.setattr(drift, "REFERENCE", 100)
    recipe = tiny_recipe(tmp_path).changed("adapt", min_tokens=7000)
    begin(recipe.head_dir, "head", {"target": {}})
    finish(recipe.head_dir, {})
    opened = Loop.opened(recipe, [])
    opened.state.reference_from = opened.served.since = NOW
    opened.save()
    return opened


def reopened(loop: Loop) -> Loop:
    """As the next process would have it."""
    return Loop.opened(loop.recipe, [])


def answered(loop: Loop, count: int, rate: float, start: float, workload: str = "chat") -> None:
    """Requests that the head in service has answered."""
    rows = requests(count, rate, head=str(loop.head_dir(loop.served.name)), start=start, workload=workload)
    write(folder(loop.recipe) / "counts", rows)
    write(folder(loop.recipe) / "captured", captured(rows))


def test_steady_traffic_changes_nothing_and_is_compared_with_one_reference(loop, monkeypatch):
    """Its charts are made once, and older records are forgotten."""
    made = []
    monkeypatch.setattr(drift, "charts_of", lambda *arguments, make=drift.charts_of: made.append(1) or make(*arguments))
    loop.state.alarmed = NOW - 100  # of the drift before
    for start in (NOW - 100, NOW, NOW + 200):
        answered(loop, 100, 0.6, start)
        loop.step()
    assert len(made) == 1
    assert len(loop.records("counts")) == 200
    assert [r["at"] for r in reopened(loop).state.reference] == [NOW + i for i in range(100)]
    assert (loop.state.phase, [e["event"] for e in loop.state.history]) == ("watch", ["in service"])
    assert folder(loop.recipe).stat().st_mode & 0o777 == 0o700


def test_the_reference_outlives_its_records_of_which_the_newest_are_kept(loop, monkeypatch):
    """In months of steady traffic; a fall is still seen by a loop that is started after them."""
    monkeypatch.setattr(drift, "WINDOW", 120)
    for start, rate in ((NOW, 0.6), (NOW + 200, 0.6), (NOW + 1000, 0.3)):
        answered(loop, 150, rate, start)
        if rate == 0.6:
            loop.step()
            assert len(loop.records("counts")) == 120
    for segment in Log(folder(loop.recipe) / "counts").segments()[:-1]:
        segment.unlink()
    loop = reopened(loop)
    loop.step()
    assert loop.state.phase == "collect"
    assert f"{drift.length(loop.state.reference):.2f} before" in loop.state.history[-1]["why"]


def test_a_fall_is_noted_with_what_changed_and_tokens_are_collected(loop):
    answered(loop, 150, 0.6, NOW)
    answered(loop, 80, 0.35, NOW + 1000, "code")
    loop.step()
    assert loop.state.phase == "collect"
    event = loop.state.history[-1]
    assert event["event"] == "drift"
    assert {row["workload"] for row in event["changed"]} == {"all", "chat", "code"}
    loop = reopened(loop)
    for count, phase in ((0, "collect"), (40, "train")):  # 100 requests or more of 70 tokens since
        answered(loop, count, 0.35, NOW + 2000, "code")
        loop.step()
        assert loop.state.phase == phase
    assert loop.candidate.name == "tiny-adapt-1"
    page = write_history(loop).read_text()
    assert "drift" in page
    assert "prompt_ids" not in json.dumps(loop.state.history)


def test_too_few_to_hold_one_out_are_waited_for(loop):
    loop.state.phase, loop.state.alarmed = "collect", NOW
    loop.recipe = loop.recipe.changed("adapt", min_tokens=100)
    answered(loop, 2, 0.5, NOW)
    for phase, attempt in (("train", 1), ("collect", 1), ("collect", 1)):
        loop.step()
        assert (loop.state.phase, loop.state.attempt) == (phase, attempt)
    event = loop.state.history[-1]
    assert event["event"] == "refused"
    assert "adapt.min_tokens" in event["why"]


def promoted(loop: Loop, at: float) -> None:
    loop.state.heads.append(Head(name="tiny-adapt-1", since=at))
    loop.state.probation, loop.state.reference_from, loop.state.alarmed = True, at, NOW
    loop.save()


@pytest.mark.parametrize(
    ("before", "after", "rate", "served", "event", "why"),
    [
        (150, 90, 0.3, "tiny", "rolled back", "acceptance fell on all"),
        (150, 100, 0.6, "tiny-adapt-1", "kept", "no fall"),
        (63, 100, 0.3, "tiny-adapt-1", "kept", "too few requests to compare with: 63, not 64"),
    ],
)
def test_a_promoted_head_that_accepts_less_is_rolled_back(loop, before, after, rate, served, event, why):
    answered(loop, before, 0.5, NOW)
    promoted(loop, NOW + 1000)
    answered(loop, after, rate, NOW + 1000)
    loop.step()
    assert (reopened(loop).served.name, loop.state.probation) == (served, False)
    assert loop.state.history[-1]["event"] == event
    assert why in loop.state.history[-1]["why"]


def test_a_roll_back_during_a_training_is_not_undone(loop, monkeypatch):
    """The server is told at once by who asks; the loop answers when its step ends."""
    promoted(loop, NOW + 1000)
    loop.state.phase, loads = "train", []
    server = SimpleNamespace(load=lambda head: loads.append(head.name))

    def train() -> None:
        server.load(loop.head_dir(reopened(loop).request_roll_back().name))

    monkeypatch.setattr(loop, "_train", train)
    monkeypatch.setattr("drafthead.adapting.loop.POLL_S", 0)
    run_loop(loop, server, lambda: "tiny" in loads, lambda _: None)
    assert loads[:2] == ["tiny-adapt-1", "tiny"]
    assert set(loads[2:]) == {"tiny"}
    assert (reopened(loop).served.name, loop.state.phase) == ("tiny", "watch")
    assert [e["why"] for e in loop.state.history if e["event"] == "rolled back"] == ["asked for"]  # once


@pytest.mark.parametrize(
    ("trial_requests", "needed", "served", "candidate", "expected"),
    [
        (100, 100, 0.45, 0.6, ("tiny-adapt-1", "watch", True, "in service")),
        (1, 16, 0.6, 0.45, ("tiny", "collect", False, "refused")),  # fewer decide nothing
    ],
)
def test_real_requests_decide_after_the_replay(loop, trial_requests, needed, served, candidate, expected):
    state = loop.state
    loop.recipe = loop.recipe.changed("adapt", trial_requests=trial_requests)
    state.phase, state.cycle, state.attempt, state.reference_from = "trial", 1, 1, NOW + 2000
    answered(loop, 120, served, NOW + 2000)
    rows = requests(needed, candidate, head=str(loop.head_dir("tiny-adapt-1")), start=NOW + 2000, seed=9)
    write(folder(loop.recipe) / "counts", rows[1:])
    loop.step()
    assert (loop.served.name, state.phase) == ("tiny", "trial")
    write(folder(loop.recipe) / "counts", rows[:1])
    loop.step()
    assert (loop.served.name, state.phase, state.probation, state.history[-1]["event"]) == expected


def test_a_trial_of_responses_longer_than_its_turns_has_longer_ones_and_ends_with_the_head_in_service(loop):
    state, loads = loop.state, []
    loop.recipe = loop.recipe.changed("adapt", trial_requests=20)
    state.phase, state.cycle, state.reference_from = "trial", 1, NOW
    answered(loop, 50, 0.6, NOW)
    loop.save()
    loop = reopened(loop)
    state = loop.state
    run_loop(loop, SimpleNamespace(load=lambda head: loads.append(head.name)), lambda: True, lambda _: None)
    assert state.reference_from > NOW + 4000, "what came before the loop went on is not compared"
    assert (state.turn_s, loads[-1]) == (15.0, "tiny")
    start = state.reference_from
    write(folder(loop.recipe) / "counts", requests(201, 0.6, head=MIXED, start=start))
    loop.step()
    assert (reopened(loop).state.turn_s, state.phase) == (30.0, "trial")
    assert state.reference_from > start
    state.reference_from = time.time() - 31
    assert loop.head_to_serve() == "tiny-adapt-1"


@pytest.mark.parametrize("looping", [SERVED, HEAD])
def test_prompts_whose_response_loops_on_either_side_are_not_compared(loop, monkeypatch, looping):
    """Where it does not, the candidate gains; where it does, it loses far more."""
    loop.state.phase, loop.state.cycle = "compare", 1
    results = loop.candidate.results_dir / "acceptance"
    rows = [
        dict.fromkeys(ACCEPTANCE_COLUMNS, 0)
        | {"method": method, "prompt_id": str(i), "category": "chat", "drafts": 20, "accepted": accepted + i % 3}
        | {"repeated": 0.8 * (i < 20 and method == looping)}
        for method, one, other in ((SERVED, 59, 20), (HEAD, 5, 30))
        for i, accepted in enumerate([one] * 20 + [other] * 20)
    ]
    write_rows(pd.DataFrame(rows), results / "method-all.parquet")
    monkeypatch.setattr("drafthead.adapting.loop.run_script", lambda script, arguments: None)
    loop.step()
    assert loop.state.phase == "trial"


def test_the_stages_understand_any_name_of_a_folder(loop):
    loop.recipe = loop.recipe.model_copy(update={"output_dir": "/some, where: #1"})
    recipe = load_recipe(overrides=[f"output_dir={loop.recipe.output_dir!r}", *loop._overrides()])
    assert recipe.prompts.sources[0].path == "/some, where: #1/data/tiny-adapt-0/captured.jsonl"
    assert recipe.eval.methods[0].head == "/some, where: #1/heads/tiny"


def test_copies_are_deleted_once_and_results_of_the_same_name_stay(loop):
    """The head that was promoted has the candidate's name, under which anybody may evaluate it."""
    loop.state.cycle = 1
    results = loop.candidate.results_dir
    results.mkdir(parents=True)
    loop.step()
    assert not results.exists()
    results.mkdir(parents=True)
    loop.step()
    reopened(loop).step()
    assert results.exists()


def test_a_candidate_whose_copies_memory_has_lost_is_trained_anew(loop):
    loop.state.phase, loop.state.cycle = "compare", 1
    copies = loop.candidate.prompts_dir.parent
    in_memory(copies)
    assert copies.stat().st_mode & 0o777 == 0o700
    loop._restart_cycle()
    assert (loop.state.phase, loop.state.cycle) == ("compare", 1)
    shutil.rmtree(copies.resolve())
    loop._restart_cycle()
    assert (loop.state.phase, loop.state.cycle) == ("train", 2)
    assert not copies.is_symlink()
