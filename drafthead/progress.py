"""Progress of long work: a bar with rate and ETA on standard error, and a status line for a long wait."""

import logging
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from rich.console import Console
from tqdm import tqdm

logger = logging.getLogger(__name__)


def progress_bar(total: int | None, description: str, unit: str, items: Iterable | None = None, **options: Any) -> tqdm:
    """A bar to iterate over (`items`), or for a `with` block that advances it with `.update(n)`; options are tqdm's."""
    # A log file gets a line now and then instead of a redraw ten times a second.
    interval = 0.2 if sys.stderr.isatty() else 10.0
    return tqdm(items, f"{description:<22}", total, unit=unit, mininterval=interval, dynamic_ncols=True, **options)


def terminal() -> Console:
    """Where tables are printed. Names in them are never markup; a log file, which has no width, gets 140 columns."""
    return Console(markup=False, emoji=False, width=None if sys.stdout.isatty() else 140)


_POLL_EVERY = 0.25  # seconds
_LOG_AFTER = 3.0  # a shorter wait is not worth a line
_LOG_EVERY = 60.0


def wait_until(done: Callable[[], bool], what: str) -> float:
    """Poll without a time limit, and log now and then what is waited for and for how long.

    Args:
        done: condition, called four times a second. It may be a collective operation, if every rank waits with it.
        what: end of the sentence "waiting for ..."; it should name what ends the wait.

    Returns:
        Seconds waited.
    """
    started = time.monotonic()
    log_next = _LOG_AFTER
    while not done():
        waited = time.monotonic() - started
        if waited >= log_next:
            logger.info("waiting for %s (%.0f s so far)", what, waited)
            log_next = waited + _LOG_EVERY
        time.sleep(_POLL_EVERY)
    return time.monotonic() - started
