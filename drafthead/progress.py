"""One way to show that long work is moving, a bar with rate and ETA on standard error, or why it is not."""

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from tqdm import tqdm

T = TypeVar("T")


def _options(description: str, unit: str) -> dict:
    # A log file gets a line now and then instead of a redraw ten times a second.
    interval = 0.2 if sys.stderr.isatty() else 10.0
    return {"desc": f"{description:<22}", "unit": unit, "mininterval": interval, "dynamic_ncols": True}


def progress(items: Iterable[T], description: str, unit: str = "it", total: int | None = None) -> Iterator[T]:
    """Iterate over `items` behind a progress bar."""
    yield from tqdm(items, total=total, **_options(description, unit))


@contextmanager
def progress_bar(
    total: int, description: str, unit: str = "it", initial: int = 0, disable: bool = False
) -> Iterator[tqdm]:
    """A bar that the caller advances with `.update(n)`; `disable` it on all ranks but one."""
    with tqdm(total=total, initial=initial, disable=disable, **_options(description, unit)) as bar:
        yield bar


_LOOK_EVERY = 0.25  # seconds
_SAY_AFTER = 3.0  # a shorter wait is not worth a line
_SAY_AGAIN = 60.0


def wait_until(done: Callable[[], bool], what: str, quiet: bool = False) -> float:
    """Look again and again, without an end, and say now and then what is waited for and for how long.

    Args:
        done: asked four times a second. It may be a collective operation, if every rank waits with it.
        what: completes "waiting for ..."; it should say who ends the wait.
        quiet: say nothing, on all ranks but one.

    Returns:
        Seconds waited.
    """
    started = time.monotonic()
    say_next = _SAY_AFTER
    while not done():
        waited = time.monotonic() - started
        if waited >= say_next and not quiet:
            tqdm.write(f"waiting for {what} ({waited:.0f} s so far)", file=sys.stderr)
            say_next = waited + _SAY_AGAIN
        time.sleep(_LOOK_EVERY)
    return time.monotonic() - started
