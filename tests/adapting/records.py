"""Requests as a server writes them down, drawn from known rates."""

from pathlib import Path
from typing import Any

import numpy as np

from drafthead.adapting.capture import Log


def requests(
    count: int, rate: float, *, head: str = "a", workload: str = "chat", start: float = 0.0, seed: int = 0
) -> list[dict[str, Any]]:
    """`count` requests, a second apart, whose drafts are accepted at about `rate` each, unequally by request."""
    rng = np.random.default_rng(seed)
    drafts = rng.integers(8, 50, count)
    chances = rng.beta(8, 8 * (1 - rate) / rate, count)
    return [
        {
            "at": start + i, "workload": workload, "head": head, "prompt_tokens": 100, "response_tokens": int(3 * n),
            "drafts": int(n), "proposed": int(3 * n), "accepted": int(rng.binomial(3 * n, p)),
        }
        for i, (n, p) in enumerate(zip(drafts, chances, strict=True))
    ]  # fmt: skip


def captured(rows: list[dict[str, Any]], seed: int = 0) -> list[dict[str, Any]]:
    """The same with token ids, no two prompts alike."""
    rng = np.random.default_rng(seed)
    return [
        row | {"prompt_ids": rng.integers(100, 3000, 40).tolist(), "response_ids": rng.integers(100, 3000, 30).tolist()}
        for row in rows
    ]


def write(directory: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a log."""
    log = Log(directory)
    for row in rows:
        log.append(row)
