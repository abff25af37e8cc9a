"""Waiting is said, to the point and not too often."""

from drafthead import progress


def test_a_wait_is_said_now_and_then_and_measured(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_LOOK_EVERY", 0.01)
    monkeypatch.setattr(progress, "_SAY_AFTER", 0.03)
    looks = iter([False] * 10 + [True])
    assert progress.wait_until(lambda: next(looks), "the kettle; if it is off: turn it on") >= 0.1
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if line] == ["waiting for the kettle; if it is off: turn it on (0 s so far)"]


def test_a_short_wait_and_a_quiet_rank_say_nothing(capsys, monkeypatch):
    assert progress.wait_until(lambda: True, "nothing") < 1
    monkeypatch.setattr(progress, "_LOOK_EVERY", 0.01)
    monkeypatch.setattr(progress, "_SAY_AFTER", 0)
    looks = iter([False, False, True])
    progress.wait_until(lambda: next(looks), "the kettle", quiet=True)
    assert capsys.readouterr().err == ""
