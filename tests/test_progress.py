"""A long wait is logged, not too often, and measured."""

import pytest

from drafthead import progress


@pytest.mark.parametrize(
    ("log_after", "quiet", "lines"), [(0.03, False, 1), (3, False, 0), (0, True, 0)], ids=["long", "short", "quiet"]
)
def test_a_wait_is_logged_once_it_is_long(log_after, quiet, lines, caplog, monkeypatch):
    caplog.set_level("INFO")
    monkeypatch.setattr(progress, "_POLL_EVERY", 0.01)
    monkeypatch.setattr(progress, "_LOG_AFTER", log_after)
    polls = iter([False] * 10 + [True])
    assert progress.wait_until(lambda: next(polls), "the harvester", quiet) >= 0.1
    assert [("the harvester" in message) for message in caplog.messages] == [True] * lines
