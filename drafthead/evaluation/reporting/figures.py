"""The plots: acceptance by workload and by draft position, rates and times over load, acceptance over draft length.

Changes, matrices and prices have no plot: their tables say the same with intervals and are coloured.
"""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drafthead.config.evaluation import ALL, OWN
from drafthead.evaluation.reporting.serving_tables import grouped, label_of, series_name
from drafthead.evaluation.results.levels import MEASURE, Level
from drafthead.evaluation.results.summary import AcceptanceSummary
from drafthead.evaluation.workload import BASELINE, NAMES

_COLOURS = {OWN: "#2f6fde", "ngram": "#d9822b", BASELINE: "#7a7f87"}
_OTHERS = ("#8a56c2", "#1f9e9e", "#c2568a", "#7d9e1f", "#5668c2")
_INK = "#7a8089"  # legible on light and on dark paper, so that one transparent image serves both
_MARKERS = "osD^vP*X"
# Of a recipe's report: what an operator pays and what a user waits for.
CURVES = ("output_tokens_per_s", "e2e_p50", "ttft_p50", "tpot_mean")


@dataclass(frozen=True)
class Picture:
    """One plot as PNG bytes."""

    name: str
    caption: str
    png: bytes


def _picture(
    name: str, caption: str, draw: Callable[[Figure], None], size: tuple[float, float] = (7.2, 3.4)
) -> Picture:
    style: dict[Any, Any] = {
        "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.3,
        "text.parse_math": False,  # a dollar in the name of a source is a dollar
        "axes.axisbelow": True, "legend.frameon": False, "figure.facecolor": "none", "axes.facecolor": "none",
        **dict.fromkeys(
            ("text.color", "axes.labelcolor", "xtick.color", "ytick.color", "axes.edgecolor", "grid.color"), _INK
        ),
    }  # fmt: skip
    with rc_context(style):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=160)
    return Picture(name, caption, buffer.getvalue())


def _colour_of(method: str, methods: Sequence[str]) -> str:
    """The method's colour: fixed for those every recipe has, else by its place among the others."""
    others = [name for name in methods if name not in _COLOURS]
    return _COLOURS.get(method) or _OTHERS[others.index(method) % len(_OTHERS)]


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


def _lengths(axes: Axes, summary: AcceptanceSummary) -> None:
    categories = [ALL, *sorted({m.category for m in summary.methods} - {ALL})]
    methods = list(dict.fromkeys(m.method for m in summary.methods))
    for j, method in enumerate(methods):
        entries = [summary.of(method, c).length for c in categories]
        value = np.array([e.value for e in entries])
        reach = np.abs(np.array([[e.value - e.low, e.high - e.value] for e in entries]).T)
        at = np.arange(len(categories)) + (j - (len(methods) - 1) / 2) * 0.22
        axes.errorbar(value, at, xerr=reach, fmt="o", capsize=3, color=_colour_of(method, methods), label=NAMES[method])
    axes.set(yticks=range(len(categories)), yticklabels=categories, xlabel="acceptance length (tokens, bonus included)")
    axes.set_xlim(left=1.0)
    axes.invert_yaxis()
    _legend(axes)


def _positions(axes: Axes, summary: AcceptanceSummary) -> None:
    methods = list(dict.fromkeys(m.method for m in summary.methods))
    for method in methods:
        positions, colour = summary.of(method).positions, _colour_of(method, methods)
        at = np.arange(1, len(positions.unconditional) + 1)
        axes.plot(at, 100 * positions.unconditional, "o-", color=colour, label=NAMES[method])
        axes.plot(at, 100 * positions.conditional, "o--", color=colour, alpha=0.6)
    longest = max(m.K for m in summary.methods)
    axes.set(xticks=range(1, longest + 1), xlabel="draft position", ylabel="accepted (%)", ylim=(0, 100))
    _legend(axes)


def _legend(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)


def serving_pictures(levels: Sequence[Level], prefix: str = "", measures: Sequence[str] = CURVES) -> list[Picture]:
    """By workload: measures over concurrency from two loads on, acceptance over K from two draft lengths on.

    Args:
        levels: measured.
        prefix: of the names of the pictures.
        measures: keys of MEASURE.
    """
    found = []
    for index, ((workload,), own) in enumerate(grouped(levels, "workload").items()):
        steady = [level for level in own if level.steady] or own
        if len({level.concurrency for level in steady}) > 1:
            found.append(
                _picture(
                    f"{prefix}curves-{index}",
                    f"{workload} prompts, over concurrency; levels that were not reached are hollow.",
                    lambda figure, steady=steady: _curves(figure, steady, measures),  # type: ignore[misc]
                    size=(7.2, 3.0 * -(-len(measures) // 2)),
                )
            )
        drafted = [level for level in own if not np.isnan(level.acceptance_length)]
        if any(len({level.K for level in same}) > 1 for same in grouped(drafted, "method").values()):
            found.append(
                _picture(
                    f"{prefix}acceptance-k-{index}",
                    f"Acceptance length over draft length under load, {workload} prompts; the band spans the loads.",
                    lambda figure, drafted=drafted: _over_draft_length(figure.subplots(), drafted),  # type: ignore[misc]
                )
            )
    return found


def _curves(figure: Figure, levels: Sequence[Level], measures: Sequence[str]) -> None:
    """A panel for every measure, a line for the baseline and for every method and draft length."""
    grid = figure.subplots(-(-len(measures) // 2), 2, squeeze=False).flatten()
    loads = sorted({level.concurrency for level in levels})
    series = grouped(levels, "method", "K")
    methods = [method for method, _ in series]
    for axes, key in zip(grid, measures, strict=False):
        scale = MEASURE[key].scale
        baseline = {level.concurrency: level for level in levels}
        _line(axes, loads, baseline, key, 0, "o", _COLOURS[BASELINE], NAMES[BASELINE])
        for (method, K), own in series.items():
            place = [k for name, k in series if name == method].index(K)
            by_load = {level.concurrency: level for level in own}
            _line(
                axes, loads, by_load, key, 1, _MARKERS[place % len(_MARKERS)], _colour_of(method, methods),
                series_name(method, K),
            )  # fmt: skip
        axes.set(xticks=range(len(loads)), xticklabels=[str(load) for load in loads], xlabel="requests in flight")
        axes.set_ylabel(label_of(key))
        axes.set_ylim(0, 1.05 * scale * max(max(level.values[key]) for level in levels))
    for spare in grid[len(measures) :]:
        spare.remove()
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)


def _line(
    axes: Axes, loads: list[int], by_load: dict[int, Level], key: str, side: int, marker: str, colour: str, label: str
) -> None:
    at = [loads.index(load) for load in sorted(by_load)]
    values = [by_load[load].values[key][side] * MEASURE[key].scale for load in sorted(by_load)]
    axes.plot(at, values, "-", color=colour, label=label)
    for x, y, load in zip(at, values, sorted(by_load), strict=True):
        axes.plot(x, y, marker, color=colour, fillstyle="full" if by_load[load].reached else "none")


def _over_draft_length(axes: Axes, levels: Sequence[Level]) -> None:
    """Mean over the loads, in a band from the least to the most."""
    by_method = grouped(levels, "method")
    for (method,), own in by_method.items():
        lengths = [[level.acceptance_length for level in same] for _, same in sorted(grouped(own, "K").items())]
        K, colour = sorted({level.K for level in own}), _colour_of(method, [name for (name,) in by_method])
        axes.plot(K, [np.mean(same) for same in lengths], "o-", color=colour, label=NAMES[method])
        axes.fill_between(K, [min(same) for same in lengths], [max(same) for same in lengths], color=colour, alpha=0.2)
    axes.set(xticks=sorted({level.K for level in levels}), xlabel="draft tokens K")
    axes.set_ylabel("acceptance length (tokens)")
    axes.set_ylim(bottom=1.0)
    _legend(axes)
