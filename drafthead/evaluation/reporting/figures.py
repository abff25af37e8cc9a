"""The plots: acceptance by workload and by draft position, rates and times over load, acceptance over draft length.

Changes, matrices and prices have no plot: their tables say the same with intervals and are coloured.
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drafthead.config.evaluation import ALL, HEAD
from drafthead.evaluation.results.levels import MEASURE, LoadComparison, Measure, grouped
from drafthead.evaluation.results.summary import AcceptanceSummary
from drafthead.evaluation.workload import BASELINE, MethodNames
from drafthead.statistics import few

_COLOURS = {HEAD: "#2f6fde", "ngram": "#d9822b", BASELINE: "#7a7f87"}
_OTHERS = ("#8a56c2", "#1f9e9e", "#c2568a", "#7d9e1f", "#5668c2")
_INK = "#7a8089"  # legible on light and on dark paper, so that one transparent image serves both
_MARKERS = "osD^vP*X"
# Of a recipe's report: what an operator pays and what a user waits for.
CURVES = ("output_tokens_per_s", "e2e_p50", "ttft_p50", "tpot_mean")
_STYLE: dict[Any, Any] = {
    "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
    "text.parse_math": False,  # a dollar in the name of a source is a dollar
    "axes.axisbelow": True, "legend.frameon": False, "figure.facecolor": "none", "axes.facecolor": "none",
    **dict.fromkeys(
        ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor", "grid.color"), _INK
    ),
}  # fmt: skip


class Picture(NamedTuple):
    """One plot as PNG bytes."""

    name: str
    caption: str
    png: bytes


@contextmanager
def _picture(found: list[Picture], name: str, caption: str, height: float = 3.4) -> Iterator[Figure]:
    """A figure to draw in, which is added to what was found when the block ends."""
    with rc_context(_STYLE):
        figure = Figure(figsize=(7.2, height), layout="constrained")
        yield figure
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=160)
    found.append(Picture(name, caption, buffer.getvalue()))


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)


def _colours(methods: Sequence[str]) -> dict[str, str]:
    """Method -> colour: fixed for those every recipe has, else by its place among the others."""
    others = [name for name in dict.fromkeys(methods) if name not in _COLOURS]
    return _COLOURS | {name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(others)}


def acceptance_pictures(summary: AcceptanceSummary, names: MethodNames) -> list[Picture]:
    """Acceptance length by workload, and acceptance by draft position."""
    found: list[Picture] = []
    categories = [ALL, *sorted({m.category for m in summary.methods} - {ALL})]
    colours = _colours([m.method for m in summary.methods])
    methods = list(dict.fromkeys(m.method for m in summary.methods))
    apart = min(0.22, 0.8 / len(methods))  # of rows that are 1 apart
    caption = (
        "Acceptance length by workload with 95 % intervals; 1.0 means that no draft was accepted. Prompts whose "
        "number n is given are too few to decide anything."
    )
    with _picture(found, "acceptance-length", caption) as figure:
        axes = figure.subplots()
        for j, method in enumerate(methods):
            lengths = [summary.of(method, category).length for category in categories]
            value, low, high = np.array([(i.value, i.low, i.high) for i in lengths]).T
            height = np.arange(len(categories)) + (j - (len(methods) - 1) / 2) * apart
            reach = np.abs([value - low, high - value])
            axes.errorbar(value, height, xerr=reach, fmt="o", capsize=3, color=colours[method], label=names[method])
        prompts = {m.category: m.prompts for m in summary.methods}
        labels = [f"{name} (n = {prompts[name]})" if few(prompts[name]) else name for name in categories]
        axes.set(yticks=range(len(categories)), yticklabels=labels)
        axes.set_xlabel("acceptance length (tokens, bonus included)")
        axes.set_xlim(left=1.0)
        axes.invert_yaxis()
        _legend(axes)
    caption = "Share of drafts accepted up to each position (solid), and given that the position before was (dashed)."
    with _picture(found, "acceptance-position", caption) as figure:
        axes = figure.subplots()
        for method in methods:
            own = summary.of(method)
            at = np.arange(1, own.K + 1)
            axes.plot(at, 100 * own.unconditional, "o-", color=colours[method], label=names[method])
            axes.plot(at, 100 * own.conditional, "o--", color=colours[method], alpha=0.6)
        ticks = range(1, max(m.K for m in summary.methods) + 1)
        axes.set(xticks=ticks, xlabel="draft position", ylabel="accepted (%)", ylim=(0, 100))
        _legend(axes)
    return found


def serving_pictures(
    levels: Sequence[LoadComparison], names: MethodNames, prefix: str = "", measures: Sequence[str] = CURVES
) -> list[Picture]:
    """By workload: measures over concurrency from two loads on, acceptance over K from two draft lengths on.

    Args:
        levels: measured.
        names: of the methods.
        prefix: of the names of the pictures.
        measures: keys of MEASURE.
    """
    found: list[Picture] = []
    rows = -(-len(measures) // 2)
    for index, own in enumerate(grouped(levels, "setting").values()):
        workload = own[0].key.workload_title
        steady = [level for level in own if level.key.steady] or own
        if len({level.key.concurrency for level in steady}) > 1:
            caption = f"{workload} prompts, over concurrency; levels that were not reached are hollow."
            with _picture(found, f"{prefix}curves-{index}", caption, 3.0 * rows) as figure:
                grid = figure.subplots(rows, 2, squeeze=False).flatten()
                for axes, key in zip(grid, measures, strict=False):
                    _curves(axes, steady, MEASURE[key], names)
                for spare in grid[len(measures) :]:
                    spare.remove()
                figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
        drafted = [level for level in own if not np.isnan(level.acceptance_length.value)]
        if any(len({level.key.K for level in same}) > 1 for same in grouped(drafted, "method").values()):
            caption = f"Acceptance length over draft length under load, {workload} prompts; the band spans the loads."
            with _picture(found, f"{prefix}acceptance-k-{index}", caption) as figure:
                _over_draft_length(figure.subplots(), drafted, names)
    return found


def _curves(axes: Axes, levels: Sequence[LoadComparison], measure: Measure, names: MethodNames) -> None:
    """A line for the baseline and for every method and draft length, over requests in flight."""
    loads = sorted({level.key.concurrency for level in levels})
    series = grouped(levels, "method", "K")
    colours = _colours([method for method, _ in series])
    lines = [(BASELINE, 0, levels), *((method, K, own) for (method, K), own in series.items())]
    for method, K, own in lines:
        by_load = sorted({level.key.concurrency: level for level in own}.items())
        at = [loads.index(load) for load, _ in by_load]
        values = [measure.scale * level.values[measure.key][method != BASELINE] for _, level in by_load]
        axes.plot(at, values, "-", color=colours[method], label=names.at(method, K))
        lengths = [k for name, k in series if name == method]
        marker = _MARKERS[lengths.index(K) % len(_MARKERS)] if lengths else "o"
        for x, y, (_, level) in zip(at, values, by_load, strict=True):
            axes.plot(x, y, marker, color=colours[method], fillstyle="full" if level.reached else "none")
    axes.set(xticks=range(len(loads)), xticklabels=[str(load) for load in loads], xlabel="requests in flight")
    axes.set_ylabel(measure.title)
    highest = np.nan_to_num([level.values[measure.key] for level in levels]).max()
    axes.set_ylim(0, 1.05 * measure.scale * highest or 1.0)  # no request may have the measure


def _over_draft_length(axes: Axes, levels: Sequence[LoadComparison], names: MethodNames) -> None:
    """Mean over the loads, in a band from the least to the most."""
    colours = _colours([level.key.method for level in levels])
    for (method,), own in grouped(levels, "method").items():
        by_K = sorted(grouped(own, "K").items())
        lengths = {K: [level.acceptance_length.value for level in same] for (K,), same in by_K}
        least, mean, most = np.array([(min(same), np.mean(same), max(same)) for same in lengths.values()]).T
        axes.plot(list(lengths), mean, "o-", color=colours[method], label=names[method])
        axes.fill_between(list(lengths), least, most, color=colours[method], alpha=0.2)
    axes.set(xticks=sorted({level.key.K for level in levels}), xlabel="draft tokens K")
    axes.set_ylabel("acceptance length (tokens)")
    axes.set_ylim(bottom=1.0)
    _legend(axes)
