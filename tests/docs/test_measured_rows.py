"""Figures of docs/quality.md and benchmarks/README.md follow from the rows that were measured."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from drafthead.statistics import acceptance_length_interval, length_change

ROOT = Path(__file__).resolve().parents[2]
QUALITY, PEERS, README = ROOT / "docs" / "quality.md", ROOT / "benchmarks" / "README.md", ROOT / "README.md"
BESIDE_PEERS = [  # page, how a line of its table begins, target, peer
    (PEERS, "| embedded, SpecForge |", "embedded", "SpecForge 0.2.0"),
    (PEERS, "| embedded, speculators |", "embedded", "speculators 0.9.0"),
    (PEERS, "| second, SpecForge |", "second", "SpecForge 0.2.0"),
    (PEERS, "| second, speculators |", "second", "speculators 0.9.0"),
    (README, "| SpecForge 0.2.0, embedded target |", "embedded", "SpecForge 0.2.0"),
    (README, "| speculators 0.9.0, embedded target |", "embedded", "speculators 0.9.0"),
    (README, "| SpecForge, a small Qwen3 model |", "second", "SpecForge 0.2.0"),
    (README, "| speculators, a small Qwen3 model |", "second", "speculators 0.9.0"),
]
CHANGES = [  # page, how a line of its table begins, target, head, over which other one
    (QUALITY, "| embedded, **prompt_quarter**", "embedded", "prompt_quarter", "responses"),
    (QUALITY, "| second, **prompt_quarter**", "second", "prompt_quarter", "responses"),
    (QUALITY, "| embedded, **`feature_weight` 0.1**", "embedded", "features", "prompt_quarter"),
    (QUALITY, "| second, **`feature_weight` 0.1**", "second", "features", "prompt_quarter"),
    (QUALITY, "| embedded, **`temperature` 0.7**", "embedded", "momentum_095", "features"),
    (QUALITY, "| second, **`temperature` 0.7**", "second", "momentum_095", "features"),
    (QUALITY, "| embedded, 200 others |", "embedded, other prompts", "momentum_095", "features"),
    (QUALITY, "| second, 200 others |", "second, other prompts", "momentum_095", "features"),
    (QUALITY, "| embedded, 200 other prompts, 0.9", "embedded, other prompts", "recipe", "momentum_095"),
    (QUALITY, "| second, 200 other prompts, 0.9", "second, other prompts", "recipe", "momentum_095"),
    (QUALITY, "| embedded, **momentum 0.9**", "embedded", "recipe", "momentum_095"),
    (QUALITY, "| second, **momentum 0.9**", "second", "recipe", "momentum_095"),
    (QUALITY, "| AdamW alone", "second", "adamw", "momentum_095"),
    (QUALITY, "| packs_4096: half as many steps", "second", "packs_4096", "momentum_095"),
    (QUALITY, "| cosine | 0, 1, 2 | 357", "second", "cosine", "momentum_095"),
    (QUALITY, "| steps_08: 0.8^k | 0, 1, 2 | 354", "second", "steps_08", "momentum_095"),
    *(
        (PEERS, "| second, speculators with prompts |", "second", head, "speculators 0.9.0, prompts")
        for head in ("recipe", "features", "prompt_quarter", "adamw")
    ),
    *((page, start, target, "recipe", peer) for page, start, target, peer in BESIDE_PEERS),
    *((page, start, target, "responses", peer) for page, start, target, peer in BESIDE_PEERS),
    *((page, start, target, "features", peer) for page, start, target, peer in BESIDE_PEERS[:4]),
]
LENGTHS = [
    (QUALITY, "| embedded, responses", "embedded", "responses"),
    (QUALITY, "| second, responses", "second", "responses"),
    (QUALITY, "| embedded, `temperature` 1", "embedded", "features"),
    (QUALITY, "| second, `temperature` 1", "second", "features"),
    *(
        (QUALITY, f"| {target}, 200 others", f"{target}, other prompts", head)
        for target in ("embedded", "second")
        for head in ("features", "momentum_095")
    ),
    (QUALITY, "| embedded, 200 other prompts, 0.9", "embedded, other prompts", "recipe"),
    (QUALITY, "| second, 200 other prompts, 0.9", "second, other prompts", "recipe"),
    (QUALITY, "| embedded, momentum 0.95", "embedded", "momentum_095"),
    (QUALITY, "| embedded, **momentum 0.9**", "embedded", "recipe"),
    (QUALITY, "| second, momentum 0.95", "second", "momentum_095"),
    (QUALITY, "| second, **momentum 0.9**", "second", "recipe"),
    (QUALITY, "| AdamW alone", "second", "adamw"),
    (QUALITY, "| packs_4096: half as many steps", "second", "packs_4096"),
    (QUALITY, "| cosine | 0, 1, 2 | 357", "second", "cosine"),
    (QUALITY, "| steps_08: 0.8^k | 0, 1, 2 | 354", "second", "steps_08"),
    (PEERS, "| **embedded, the recipe**", "embedded", "recipe"),
    (PEERS, "| **second, the recipe**", "second", "recipe"),
    (PEERS, "| embedded, SpecForge 0.2.0 same", "embedded", "SpecForge 0.2.0"),
    (PEERS, "| embedded, speculators 0.9.0 same", "embedded", "speculators 0.9.0"),
    (PEERS, "| second, SpecForge 0.2.0 same", "second", "SpecForge 0.2.0"),
    (PEERS, "| second, speculators 0.9.0 same |", "second", "speculators 0.9.0"),
    (PEERS, "| second, speculators 0.9.0 same, prompts too", "second", "speculators 0.9.0, prompts"),
]


@pytest.fixture(scope="module")
def all_rows() -> pd.DataFrame:
    return pd.read_parquet(ROOT / "docs" / "quality.parquet")


@pytest.fixture(scope="module")
def rows(all_rows) -> pd.DataFrame:
    return all_rows[all_rows["temperature"] == 0]


def counters(rows: pd.DataFrame, target: str, head: str, k: int) -> tuple[np.ndarray, np.ndarray]:
    """Drafts and accepted drafts, (P, S) each."""
    own = rows[(rows["target"] == target) & (rows["head"] == head) & (rows["k"] == k)]
    wide = own.pivot(index="prompt", columns="seed", values=["drafts", "accepted"])
    assert wide.shape[1] == 6
    assert not wide.isna().any().any()
    return wide["drafts"].to_numpy(), wide["accepted"].to_numpy()


def cells_of(page: Path, start: str, among: list[str]) -> list[str]:
    """Those cells of the line that begins so which are among these, in their order."""
    (line,) = [line for line in page.read_text().splitlines() if line.startswith(start)]
    return [cell.strip() for cell in plain(line).split("|") if cell.strip() in among]


def plain(text: str) -> str:
    """Without emphasis and line breaks, and with one kind of minus."""
    return " ".join(text.replace("−", "-").replace("*", "").split())


def length(drafts: np.ndarray, accepted: np.ndarray) -> str:
    found = acceptance_length_interval(drafts.sum(1), accepted.sum(1))
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"


def change(ours: tuple[np.ndarray, np.ndarray], others: tuple[np.ndarray, np.ndarray], form: str, same: bool) -> str:
    found = length_change(ours, others, same_seeds=same)
    return form.format(*(100 * value for value in (found.value, found.low, found.high)))


@pytest.mark.parametrize(("page", "start", "target", "head"), LENGTHS)
def test_lengths_are_those_of_the_rows(rows, page, start, target, head):
    shown = [length(*counters(rows, target, head, k)) for k in (3, 5)]
    assert cells_of(page, start, shown) == shown


@pytest.mark.parametrize(("page", "start", "target", "head", "other"), CHANGES)
def test_changes_are_those_of_the_rows(rows, page, start, target, head, other):
    """Of our own heads the same seeds are compared."""
    form = "{:.1f} [{:.1f}, {:.1f}]" if page == README else "{:+.1f} [{:+.1f}, {:+.1f}]"
    pairs = [[counters(rows, target, name, k) for name in (head, other)] for k in (3, 5)]
    shown = [change(ours, others, form, page == QUALITY) for ours, others in pairs]
    assert cells_of(page, start, shown) == shown


@pytest.mark.parametrize("target", ["embedded", "second"])
@pytest.mark.parametrize(
    ("head", "other"),
    [
        ("prompt_quarter", "responses"),
        ("features", "prompt_quarter"),
        ("momentum_095", "features"),
        ("recipe", "momentum_095"),
    ],
)
def test_changes_of_sampled_responses_are_those_of_the_rows(all_rows, target, head, other):
    sampled, page = all_rows[all_rows["temperature"] == 0.7], plain(QUALITY.read_text())
    for k in (3, 5):
        ours, others = (counters(sampled, target, name, k) for name in (head, other))
        assert change(ours, others, "{:+.1f} % [{:+.1f}, {:+.1f}]", same=True) in page


@pytest.mark.parametrize("thousands", [1, 2, 4, 8, 16])
def test_long_prompts_have_the_lengths_and_the_change_of_the_rows(rows, thousands):
    whole, windowed = (counters(rows, f"long {thousands}k", head, 3) for head in ("recipe", "window_256"))
    shown = [length(*whole), length(*windowed), change(windowed, whole, "{:+.1f} [{:+.1f}, {:+.1f}]", same=True)]
    assert cells_of(QUALITY, f"| {thousands},000 | {len(whole[0])} |", shown) == shown
