"""One way to show that long work is moving: a bar with rate and ETA on standard error."""

import sys
from collections.abc import Iterable, Iterator
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
