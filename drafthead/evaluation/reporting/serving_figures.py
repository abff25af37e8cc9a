"""The plots of speed under load.

Bars start at zero or are replaced by points with intervals; unresolved changes are grey, as in the tables.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drafthead.evaluation.reporting.plotting import (
    BETTER,
    PALETTE,
    UNRESOLVED,
    WORSE,
    Picture,
    colour_of,
    legend_above,
    picture,
)
from drafthead.evaluation.reporting.serving_tables import level_name, series_name
from drafthead.evaluation.results.levels import MEASURE, MEASURES, THROUGHPUT, Level, Measure
from drafthead.evaluation.workload import BASELINE

_MARKERS = "osD^vP*X"


def serving_pictures(levels: Sequence[Level]) -> list[Picture]:
    """Throughput and latency over load, the two against each other, and every relative change with its interval."""
    series = _series(levels)
    found = [
        picture(
            "throughput",
            "Output tokens per second over concurrency; levels that were not reached are hollow.",
            lambda figure: _over_load(figure.subplots(), series, THROUGHPUT),
        ),
        picture(
            "latency",
            "Median time to first token, and mean time per output token after it, over concurrency.",
            lambda figure: _latency(figure, series),
        ),
    ]
    if max(map(len, series.values())) > 1:
        found.append(
            picture(
                "pareto",
                "Throughput against the median latency of a request, one point per load: up and left is better.",
                lambda figure: _pareto(figure.subplots(), series),
            )
        )
    shown = list({(level.workload, level.load): level for level in _widest(levels)}.values())
    found.append(
        picture(
            "changes",
            "Change against the baseline with 95 % intervals, positive = better; grey: unresolved.",
            lambda figure: _changes(figure, shown),
            size=(3.0 + 2.6 * max(3, min(len(shown), 4)), (1.2 + 0.36 * len(MEASURES)) * -(-len(shown) // 4)),
            wide=True,
        )
    )
    return found


def _widest(levels: Sequence[Level]) -> list[Level]:
    """Levels of the first method and draft length, on every workload."""
    return [level for level in levels if (level.method, level.K) == (levels[0].method, levels[0].K)]


@dataclass(frozen=True)
class _Point:
    """One series at one load."""

    load: int
    reached: bool
    values: dict[str, float]


def _series(levels: Sequence[Level]) -> dict[tuple[str, int], list[_Point]]:
    """(method, K) -> its points over concurrency on the first workload, the baseline first."""
    steady = [level for level in levels if level.steady] or levels
    first = [level for level in steady if level.workload == steady[0].workload]
    found: dict[tuple[str, int], dict[int, _Point]] = {(BASELINE, 0): {}}
    for level in first:
        for key, side in (((BASELINE, 0), 0), ((level.method, level.K), 1)):
            values = {name: pair[side] for name, pair in level.values.items()}
            found.setdefault(key, {})[level.concurrency] = _Point(level.concurrency, level.reached, values)
    return {key: [points[load] for load in sorted(points)] for key, points in found.items()}


def _latency(figure: Figure, series: dict[tuple[str, int], list[_Point]]) -> None:
    left, right = figure.subplots(1, 2)
    _over_load(left, series, MEASURE["ttft_p50"])
    _over_load(right, series, MEASURE["tpot_mean"])
    right.get_legend().remove()


def _over_load(axes: Axes, series: dict[tuple[str, int], list[_Point]], measure: Measure) -> None:
    loads = sorted({p.load for points in series.values() for p in points})
    _draw(axes, series, lambda p: (loads.index(p.load), p.values[measure.key] * measure.scale))
    axes.set(xticks=range(len(loads)), xticklabels=[str(load) for load in loads], xlabel="requests in flight")
    axes.set_ylabel(f"{measure.label} ({measure.unit})")
    axes.set_ylim(bottom=0)


def _pareto(axes: Axes, series: dict[tuple[str, int], list[_Point]]) -> None:
    latency = MEASURE["e2e_p50"]
    _draw(axes, series, lambda p: (p.values[latency.key] * latency.scale, p.values[THROUGHPUT.key]))
    for points in series.values():
        for p in points:
            at = (p.values[latency.key] * latency.scale, p.values[THROUGHPUT.key])
            axes.annotate(str(p.load), at, xytext=(5, -9), textcoords="offset points", fontsize=8)
    axes.set(xlabel="median latency of a request (ms)", ylabel="output tok/s")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)


def _draw(axes: Axes, series: dict[tuple[str, int], list[_Point]], at: Callable[[_Point], tuple[float, float]]) -> None:
    methods = list(dict.fromkeys(method for method, _ in series))
    for (method, K), points in series.items():
        same = [k for name, k in series if name == method]
        x, y = zip(*map(at, points), strict=True)
        colour, shade = colour_of(method, methods), 1 - 0.6 * same.index(K) / len(same)
        marker = _MARKERS[same.index(K) % len(_MARKERS)]
        axes.plot(x, y, "-", color=colour, alpha=shade, marker=marker, label=series_name(method, K))
        hollow = [i for i, p in enumerate(points) if not p.reached]
        face = axes.get_facecolor()
        axes.scatter(
            [x[i] for i in hollow], [y[i] for i in hollow], color=face, edgecolors=colour, marker=marker, zorder=3
        )
    legend_above(axes)


def _changes(figure: Figure, levels: Sequence[Level]) -> None:
    columns = min(len(levels), 4)
    grid = figure.subplots(-(-len(levels) // columns), columns, sharey=True, sharex=True, squeeze=False)
    all_axes = grid.flatten()
    for spare in all_axes[len(levels) :]:
        spare.remove()
    for axes, level in zip(all_axes, levels, strict=False):
        for i, measure in enumerate(MEASURES):
            change = level.changes[measure.key]
            x = change.interval.scaled(100)
            colour = UNRESOLVED if not (change.resolved and level.reached) else BETTER if x.value > 0 else WORSE
            reach = np.abs(np.nan_to_num([[x.value - x.low], [x.high - x.value]]))  # no bar without an interval
            axes.errorbar(x.value, i, xerr=reach, fmt="o", capsize=3, color=colour)
        axes.axvline(0, color=PALETTE["none"], linewidth=1)
        axes.set_title(
            f"concurrency {level_name(level, levels)}" + ("" if level.reached else " (not reached)"), fontsize=10
        )
        axes.set(yticks=range(len(MEASURES)), yticklabels=[m.label for m in MEASURES])
    all_axes[0].invert_yaxis()
    figure.supxlabel("change against the baseline (%), positive = better", fontsize=10)
