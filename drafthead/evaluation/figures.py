"""The report's plots, each drawn for a light and a dark page.

Bars start at zero or are replaced by points with intervals; unresolved changes are grey, as in the tables.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drafthead.evaluation.summary import ALL, MEASURE, MEASURES, THROUGHPUT, AcceptanceSummary, Level, Measure
from drafthead.evaluation.workload import NAMES

_PALETTE = {"eagle3": "#2f6fde", "ngram": "#d9822b", "none": "#7a7f87"}
_BETTER, _WORSE, _UNRESOLVED = "#2e9e5b", "#d64545", "#9aa0a6"
_THEMES = {
    "light": {"ink": "#1d2228", "paper": "#ffffff", "grid": "#e3e6ea"},
    "dark": {"ink": "#e6e8eb", "paper": "#181c22", "grid": "#333a44"},
}


@dataclass(frozen=True)
class Picture:
    """One plot as PNG bytes for both themes."""

    name: str
    caption: str
    light: bytes
    dark: bytes
    wide: bool = False


def acceptance_pictures(summary: AcceptanceSummary) -> list[Picture]:
    """Acceptance length by workload, and acceptance by draft position."""
    return [
        _picture(
            "acceptance-length",
            "Acceptance length by workload with 95 % intervals; 1.0 means that no draft was accepted.",
            lambda figure: _lengths(figure.subplots(), summary),
        ),
        _picture(
            "acceptance-position",
            "Share of drafts accepted up to each position (solid), and given that the position before was (dashed).",
            lambda figure: _positions(figure.subplots(), summary),
        ),
    ]


def serving_pictures(levels: Sequence[Level]) -> list[Picture]:
    """Throughput over concurrency, and every relative change with its interval."""
    return [
        _picture(
            "throughput",
            "Output tokens per second over concurrency; levels that were not reached are hollow.",
            lambda figure: _throughput(figure.subplots(), levels),
        ),
        _picture(
            "latency",
            "Median time to first token, and mean time per output token after it, over concurrency.",
            lambda figure: _latency(figure, levels),
        ),
        _picture(
            "changes",
            "Change against the baseline with 95 % intervals, positive = better; grey: unresolved.",
            lambda figure: _changes(figure, levels),
            size=(3.0 + 2.6 * max(3, len(levels)), 1.2 + 0.36 * len(MEASURES)),
            wide=True,
        ),
    ]


def _picture(
    name: str, caption: str, draw: Callable[[Figure], None], size: tuple[float, float] = (7.2, 3.4), wide: bool = False
) -> Picture:
    return Picture(name, caption, _render(draw, size, "light"), _render(draw, size, "dark"), wide)


def _render(draw: Callable[[Figure], None], size: tuple[float, float], theme: str) -> bytes:
    colours = _THEMES[theme]
    style: dict[Any, Any] = {
        "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "axes.axisbelow": True, "legend.frameon": False, "figure.facecolor": colours["paper"],
        "axes.facecolor": colours["paper"], "grid.color": colours["grid"], "axes.edgecolor": colours["ink"],
        **dict.fromkeys(("text.color", "axes.labelcolor", "xtick.color", "ytick.color"), colours["ink"]),
    }  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()


def _methods(summary: AcceptanceSummary) -> list[str]:
    return list(dict.fromkeys(m.method for m in summary.methods))


def _lengths(axes: Axes, summary: AcceptanceSummary) -> None:
    categories = [ALL, *sorted({m.category for m in summary.methods} - {ALL})]
    methods = _methods(summary)
    for j, method in enumerate(methods):
        entries = [summary.of(method, c).length for c in categories]
        value = np.array([e.value for e in entries])
        reach = np.abs(np.array([[e.value - e.low, e.high - e.value] for e in entries]).T)
        at = np.arange(len(categories)) + (j - (len(methods) - 1) / 2) * 0.22
        axes.errorbar(value, at, xerr=reach, fmt="o", capsize=3, color=_PALETTE[method], label=NAMES[method])
    axes.set(yticks=range(len(categories)), yticklabels=categories, xlabel="acceptance length (tokens, bonus included)")
    axes.set_xlim(left=1.0)
    axes.invert_yaxis()
    _legend_above(axes)


def _positions(axes: Axes, summary: AcceptanceSummary) -> None:
    for method in _methods(summary):
        positions = summary.of(method).positions
        at = np.arange(1, len(positions.unconditional) + 1)
        axes.plot(at, 100 * positions.unconditional, "o-", color=_PALETTE[method], label=NAMES[method])
        axes.plot(at, 100 * positions.conditional, "o--", color=_PALETTE[method], alpha=0.6)
    axes.set(xticks=at, xlabel="draft position", ylabel="accepted (%)", ylim=(0, 100))
    _legend_above(axes)


def _throughput(axes: Axes, levels: Sequence[Level]) -> None:
    _over_load(axes, levels, THROUGHPUT)
    _legend_above(axes)


def _latency(figure: Figure, levels: Sequence[Level]) -> None:
    left, right = figure.subplots(1, 2)
    _over_load(left, levels, MEASURE["ttft_p50"])
    _over_load(right, levels, MEASURE["tpot_mean"])
    _legend_above(left)


def _over_load(axes: Axes, levels: Sequence[Level], measure: Measure) -> None:
    at = np.arange(len(levels))
    for j, arm in enumerate(("none", "eagle3")):
        values = [level.values[measure.key][j] * measure.scale for level in levels]
        axes.plot(at, values, "-", color=_PALETTE[arm], label=NAMES[arm])
        faces = [_PALETTE[arm] if level.reached else "none" for level in levels]
        axes.scatter(at, values, c=faces, edgecolors=_PALETTE[arm], zorder=3)
    axes.set(xticks=at, xticklabels=[str(level.concurrency) for level in levels], xlabel="requests in flight")
    axes.set_ylabel(f"{measure.label} ({measure.unit})")
    axes.set_ylim(bottom=0)


def _changes(figure: Figure, levels: Sequence[Level]) -> None:
    all_axes = figure.subplots(1, len(levels), sharey=True, sharex=True, squeeze=False)[0]
    for axes, level in zip(all_axes, levels, strict=True):
        for i, measure in enumerate(MEASURES):
            change = level.changes[measure.key]
            x = change.interval.scaled(100)
            colour = _UNRESOLVED if not (change.resolved and level.reached) else _BETTER if x.value > 0 else _WORSE
            reach = [[x.value - x.low], [x.high - x.value]]
            axes.errorbar(x.value, i, xerr=np.abs(reach), fmt="o", capsize=3, color=colour)
        axes.axvline(0, color=_PALETTE["none"], linewidth=1)
        axes.set_title(f"concurrency {level.concurrency}" + ("" if level.reached else " (not reached)"), fontsize=10)
        axes.set(yticks=range(len(MEASURES)), yticklabels=[m.label for m in MEASURES])
    all_axes[0].invert_yaxis()
    figure.supxlabel("change against the baseline (%), positive = better", fontsize=10)


def _legend_above(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)
