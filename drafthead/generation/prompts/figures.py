"""One picture of the prompts: lengths, categories, and how much of the text the most frequent tokens are."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure

from drafthead.files import atomic_path

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from drafthead.generation.prompts.report import Measured


def write_figure(path: Path, measured: Sequence["Measured"], draft_vocab_size: int) -> None:
    """Draw the three panels as a PNG."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    lengths, categories, vocabulary = figure.subplots(1, 3)
    _lengths(lengths, measured)
    _categories(categories, measured)
    _vocabulary(vocabulary, measured, draft_vocab_size)
    with atomic_path(path) as temporary:
        figure.savefig(temporary, format="png", dpi=100)


def _lengths(axes: "Axes", measured: Sequence["Measured"]) -> None:
    longest = max((max(m.lengths, default=1) for m in measured), default=1)
    bins = np.geomspace(1, longest + 1, 40).tolist()
    for m in measured:
        axes.hist(m.lengths, bins=bins, density=True, histtype="step", label=m.split)
    axes.set(title="length of the prompts", xlabel="tokens, template included", ylabel="density", xscale="log")
    axes.legend()


def _categories(axes: "Axes", measured: Sequence["Measured"]) -> None:
    names = [name for name, _ in Counter(c for m in measured for c in m.categories).most_common(15)][::-1]
    for i, m in enumerate(measured):
        counts = Counter(m.categories)
        shares = [counts[name] / max(len(m.categories), 1) for name in names]
        axes.barh(np.arange(len(names)) - 0.27 * (i - 1), shares, height=0.25, label=m.split)
    axes.set(title="share of each category (the 15 largest)", yticks=range(len(names)))
    axes.set_yticklabels(names)


def _vocabulary(axes: "Axes", measured: Sequence["Measured"], draft_vocab_size: int) -> None:
    order = np.argsort(-measured[0].tokens, kind="stable")
    for m in measured:
        covered = np.cumsum(m.tokens[order]) / max(m.tokens.sum(), 1)
        axes.plot(np.arange(1, len(order) + 1), covered, label=m.split)
    axes.axvline(draft_vocab_size, color="grey", linestyle=":", label="draft_vocab_size")
    axes.set(
        title="share of the text", xlabel=f"most frequent tokens of {measured[0].split}", xscale="log", ylim=(0, 1)
    )
    axes.legend()
