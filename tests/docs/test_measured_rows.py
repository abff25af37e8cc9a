"""Figures of docs/quality.md and benchmarks/README.md follow from the rows that were measured."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from drafthead.statistics import acceptance_length_interval, length_change

ROOT = Path(__file__).resolve().parents[2]
QUALITY, PEERS = ROOT / "docs" / "quality.md", ROOT / "benchmarks" / "README.md"
CHANGES = [  # page, how a line of its table begins, target, head, over which other one
    (QUALITY, "| embedded, **prompt_quarter**", "embedded", "prompt_quarter", "responses"),
    (QUALITY, "| second, **prompt_quarter**", "second", "prompt_quarter", "responses"),
    (QUALITY, "| embedded, **`feature_weight` 0.1**", "embedded", "features", "prompt_quarter"),
    (QUALITY, "| second, **`feature_weight` 0.1**", "second", "features", "prompt_quarter"),
    (QUALITY, "| embedded, **`temperature` 0.7**", "embedded", "recipe", "features"),
    (QUALITY, "| second, **`temperature` 0.7**", "second", "recipe", "features"),
    (PEERS, "| embedded, SpecForge |", "embedded", "recipe", "SpecForge 0.2.0"),
    (PEERS, "| embedded, speculators |", "embedded", "recipe", "speculators 0.9.0"),
    (PEERS, "| second, SpecForge |", "second", "recipe", "SpecForge 0.2.0"),
    (PEERS, "| second, speculators |", "second", "recipe", "speculators 0.9.0"),
]
LENGTHS = [
    (QUALITY, "| embedded, responses", "embedded", "responses"),
    (QUALITY, "| second, responses", "second", "responses"),
    (QUALITY, "| embedded, `temperature` 1", "embedded", "features"),
    (QUALITY, "| second, `temperature` 1", "second", "features"),
    (PEERS, "| **embedded, the recipe**", "embedded", "recipe"),
    (PEERS, "| **second, the recipe**", "second", "recipe"),
    (PEERS, "| embedded, SpecForge 0.2.0 same", "embedded", "SpecForge 0.2.0"),
    (PEERS, "| embedded, speculators 0.9.0 same", "embedded", "speculators 0.9.0"),
    (PEERS, "| second, SpecForge 0.2.0 same", "second", "SpecForge 0.2.0"),
    (PEERS, "| second, speculators 0.9.0 same", "second", "speculators 0.9.0"),
]


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    found = pd.read_parquet(ROOT / "docs" / "quality.parquet")
    return found[found["temperature"] == 0]


def counters(rows: pd.DataFrame, target: str, head: str, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Drafts and accepted drafts, (P, S) each."""
    own = rows[(rows["target"] == target) & (rows["head"] == head) & (rows["k"] == k)]
    wide = own.pivot(index="prompt", columns="seed", values=["drafts", "accepted"])
    assert wide.shape[1] == 6
    assert not wide.isna().any().any()
    return wide["drafts"].to_numpy(), wide["accepted"].to_numpy()


def line_of(page: Path, start: str) -> str:
    (line,) = [line for line in page.read_text().splitlines() if line.startswith(start)]
    return line.replace("−", "-").replace("*", "")


@pytest.mark.parametrize(("page", "start", "target", "head"), LENGTHS)
def test_lengths_are_those_of_the_rows(rows, page, start, target, head):
    for k in (3, 5):
        drafts, accepted = counters(rows, target, head, k)
        found = acceptance_length_interval(drafts.sum(1), accepted.sum(1))
        assert f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]" in line_of(page, start)


@pytest.mark.parametrize(("page", "start", "target", "head", "other"), CHANGES)
def test_changes_are_those_of_the_rows(rows, page, start, target, head, other):
    """Of our own heads the same seeds are compared."""
    for k in (3, 5):
        ours, others = (counters(rows, target, name, k) for name in (head, other))
        found = length_change(ours, others, same_seeds=page == QUALITY)
        shown = f"{100 * found.value:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
        assert shown in line_of(page, start)


@pytest.mark.parametrize("thousands", [1, 2, 4, 8, 16])
def test_long_prompts_have_the_lengths_and_the_change_of_the_rows(rows, thousands):
    plain, windowed = (counters(rows, f"long {thousands}k", head, 3) for head in ("recipe", "window_256"))
    found = [acceptance_length_interval(drafts.sum(1), accepted.sum(1)) for drafts, accepted in (plain, windowed)]
    shown = [f"{length.value:.2f} [{length.low:.2f}, {length.high:.2f}]" for length in found]
    change = length_change(windowed, plain, same_seeds=True)
    shown.append(f"{100 * change.value:+.1f} [{100 * change.low:+.1f}, {100 * change.high:+.1f}]")
    line = line_of(QUALITY, f"| {thousands},000 | {len(plain[0])} |")
    assert all(text in line for text in shown)
