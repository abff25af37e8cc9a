"""A long wait is logged, not too often, and measured."""

import pytest

from drafthead import progress


@pytest.mark.parametrize(("log_after", "lines"), [(0.03, 1), (3, 0)])
def test_a_wait_is_logged_once_it_is_long(log_after, lines, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(progress, "_POLL_EVERY", 0.01)
    monkeypatch.setattr(progress, "_LOG_AFTER", log_after)
    polls = iter([False] * 10 + [True])
    assert progress.wait_until(lambda: next(polls), "the harvester") >= 0.1
    assert [("the harvester" in message) for message in caplog.messages] == [True] * lines
