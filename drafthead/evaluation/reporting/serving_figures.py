"""The plots of speed under load.

Bars start at zero or are replaced by points with intervals; unresolved changes are grey, as in the tables.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from drafthead.evaluation.decision.analysis import Analysis
from drafthead.evaluation.decision.pricing import Priced
from drafthead.evaluation.reporting.figures import (
    BETTER,
    PALETTE,
    UNRESOLVED,
    WORSE,
    Picture,
    colour_of,
    legend_above,
    picture,
)
from drafthead.evaluation.reporting.serving_tables import grouped, level_name, series_name
from drafthead.evaluation.results.levels import MEASURE, MEASURES, THROUGHPUT, Level, Measure
from drafthead.evaluation.workload import BASELINE, NAMES

_MARKERS = "osD^vP*X"


@dataclass(frozen=True)
class _Point:
    """One series at one load."""

    load: int
    reached: bool
    values: dict[str, float]


# Of a recipe's report: what an operator pays and what a user waits for.
_CURVES = ("output_tokens_per_s", "e2e_p50", "ttft_p50", "tpot_mean")


def serving_pictures(levels: Sequence[Level]) -> list[Picture]:
    """Throughput and times over load, and every relative change with its interval."""
    first = [level for level in levels if level.workload == levels[0].workload]
    found = [_curves_picture("curves", first, _CURVES)]
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


def sweep_pictures(levels: Sequence[Level], prefix: str) -> list[Picture]:
    """What a published table has as curves: every rate and time over load by workload, acceptance over K, matrices.

    Args:
        levels: of one table.
        prefix: of the names of the pictures.
    """
    found = []
    for index, ((workload,), own) in enumerate(grouped(levels, "workload").items()):
        if len({level.concurrency for level in own}) > 1:
            found.append(_curves_picture(f"{prefix}-curves-{index}", own, list(own[0].values)))
        if any(len(lengths) > 1 for lengths in _lengths_by_method(own).values()):
            found.append(_acceptance_picture(f"{prefix}-acceptance-k-{index}", own, f", {workload} prompts"))
    several = {level.workload for level in levels}, {level.load for level in levels}
    return found + (_matrix_pictures(levels, f"{prefix}-") if min(map(len, several)) > 1 else [])


def _curves_picture(name: str, levels: Sequence[Level], keys: Sequence[str]) -> Picture:
    """Measures of one workload over concurrency."""
    caption = f"{levels[0].workload} prompts, over concurrency; levels that were not reached are hollow."
    size = (7.2, 3.0 * -(-len(keys) // 2))
    return picture(name, caption, lambda figure: _curves(figure, _series(levels), keys), size)


def _curves(figure: Figure, series: dict[tuple[str, int], list[_Point]], keys: Sequence[str]) -> None:
    grid = figure.subplots(-(-len(keys) // 2), 2, squeeze=False).flatten()
    for axes, key in zip(grid, keys, strict=False):
        _over_load(axes, series, MEASURE[key])
    for spare in grid[len(keys) :]:
        spare.remove()
    figure.legend(*grid[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)


def _widest(levels: Sequence[Level]) -> list[Level]:
    """Levels of the first method and draft length, on every workload."""
    return [level for level in levels if (level.method, level.K) == (levels[0].method, levels[0].K)]


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


def _over_load(axes: Axes, series: dict[tuple[str, int], list[_Point]], measure: Measure) -> None:
    loads = sorted({p.load for points in series.values() for p in points})
    methods = list(dict.fromkeys(method for method, _ in series))
    for (method, K), points in series.items():
        same = [k for name, k in series if name == method]
        x = [loads.index(p.load) for p in points]
        y = [p.values[measure.key] * measure.scale for p in points]
        colour, shade = colour_of(method, methods), 1 - 0.6 * same.index(K) / len(same)
        marker = _MARKERS[same.index(K) % len(_MARKERS)]
        axes.plot(x, y, "-", color=colour, alpha=shade, marker=marker, label=series_name(method, K))
        hollow = [(at, value) for at, value, p in zip(x, y, points, strict=True) if not p.reached]
        if hollow:
            face = axes.get_facecolor()
            axes.scatter(*zip(*hollow, strict=True), color=face, edgecolors=colour, marker=marker, zorder=3)
    axes.set(xticks=range(len(loads)), xticklabels=[str(load) for load in loads], xlabel="requests in flight")
    axes.set_ylabel(f"{measure.label} ({measure.unit})")
    axes.set_ylim(bottom=0)


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


# The plots of the decision: acceptance by draft length, and every load at every draft length.


_CHANGE = LinearSegmentedColormap.from_list("change", [WORSE, "#f4f5f7", BETTER])
_INK = "#1d2228"  # on light cells, whatever the theme


def decision_pictures(analysis: Analysis) -> list[Picture]:
    """Those whose data is there: acceptance by K from two draft lengths on, matrices from two workloads on."""
    levels, found = analysis.levels, []
    if any(len(lengths) > 1 for lengths in _lengths_by_method(levels).values()):
        found.append(_acceptance_picture("acceptance-k", levels))
    for index, (workload, priced) in enumerate(analysis.priced.items()):
        run = {(level.concurrency, level.K) for level in levels if level.workload == workload and level.steady}
        found.append(
            picture(
                "load-by-draft-length" + (f"-{index}" if index else ""),
                f"Decoding speed against no speculation (%), {workload} prompts: framed cells were run, the others are "
                "prices of the cost model; grey text: the interval includes zero.",
                lambda figure, priced=priced, run=run: _heat_map(figure, priced, run),  # type: ignore[misc]
                size=(7.2, 1.4 + 0.42 * len(priced.model.curve.known)),
            )
        )
    return found + (_matrix_pictures(levels) if len({level.workload for level in levels}) > 1 else [])


def _acceptance_picture(name: str, levels: Sequence[Level], what: str = "") -> Picture:
    caption = f"Acceptance length over draft length under load{what}; the band spans the loads."
    return picture(name, caption, lambda figure: _acceptance_by_length(figure.subplots(), levels))


def _matrix_pictures(levels: Sequence[Level], prefix: str = "") -> list[Picture]:
    return [
        picture(
            f"{prefix}matrix-{method}-k{K}",
            f"{series_name(method, K)}: output throughput against the baseline (%) by workload and load.",
            lambda figure, own=own: _matrix(figure, own),  # type: ignore[misc]
            size=(7.2, 1.4 + 0.42 * len({level.workload for level in own})),
        )
        for (method, K), own in grouped(levels, "method", "K").items()
    ]


def _lengths_by_method(levels: Sequence[Level]) -> dict[str, dict[int, list[float]]]:
    """Method -> K -> acceptance length at every load of the first workload."""
    found: dict[str, dict[int, list[float]]] = {}
    for level in levels:
        if level.workload == levels[0].workload and not np.isnan(level.acceptance_length):
            found.setdefault(level.method, {}).setdefault(level.K, []).append(level.acceptance_length)
    return found


def _acceptance_by_length(axes: Axes, levels: Sequence[Level]) -> None:
    by_method = _lengths_by_method(levels)
    for method, lengths in by_method.items():
        K, colour = sorted(lengths), colour_of(method, list(by_method))
        axes.plot(K, [np.mean(lengths[k]) for k in K], "o-", color=colour, label=NAMES[method])
        axes.fill_between(K, [min(lengths[k]) for k in K], [max(lengths[k]) for k in K], color=colour, alpha=0.2)
    axes.set(xticks=sorted({k for lengths in by_method.values() for k in lengths}), xlabel="draft tokens K")
    axes.set_ylabel("acceptance length (tokens)")
    axes.set_ylim(bottom=1.0)
    legend_above(axes)


def _heat_map(figure: Figure, priced: Priced, run: set[tuple[int, int]]) -> None:
    loads, known = sorted({p.concurrency for p in priced.prices}), priced.model.curve.known
    prices = [[priced.at(c, K) for c in loads] for K in known]
    values = np.array([[p.speedup.value - 1 for p in row] for row in prices])
    resolved = np.array([[p.speedup.low > 1 or p.speedup.high < 1 for p in row] for row in prices])
    axes = figure.subplots()
    _cells(axes, values, resolved, [str(c) for c in loads], [str(K) for K in known])
    for i, K in enumerate(known):
        for j, c in enumerate(loads):
            if (c, K) in run:
                axes.add_patch(
                    Rectangle((j - 0.47, i - 0.46), 0.94, 0.92, fill=False, edgecolor=UNRESOLVED, linewidth=1.5)
                )
    axes.set(xlabel="requests in flight", ylabel="draft tokens K")


def _matrix(figure: Figure, levels: Sequence[Level]) -> None:
    workloads = list(dict.fromkeys(level.workload for level in levels))
    loads = list(dict.fromkeys(level.load for level in levels))
    values = np.full((len(workloads), len(loads)), np.nan)
    resolved = np.zeros(values.shape, bool)
    for level in levels:
        at = workloads.index(level.workload), loads.index(level.load)
        values[at] = level.change(THROUGHPUT)
        resolved[at] = level.changes[THROUGHPUT.key].resolved and level.reached
    axes = figure.subplots()
    _cells(axes, values, resolved, loads, workloads)
    axes.set(xlabel="load")


def _cells(axes: Axes, values: np.ndarray, resolved: np.ndarray, columns: list[str], rows: list[str]) -> None:
    """Coloured cells with their change in percent; unresolved ones are grey."""
    reach = max(float(np.nanmax(np.abs(values))), 0.01)
    shown = np.where(resolved, values, np.nan)
    axes.imshow(shown, cmap=_CHANGE, norm=TwoSlopeNorm(0, -reach, reach), aspect="auto")
    for i, j in np.ndindex(*values.shape):
        if not np.isnan(values[i, j]):
            colour = _INK if resolved[i, j] else UNRESOLVED
            axes.text(j, i, f"{100 * values[i, j]:+.0f}", ha="center", va="center", fontsize=9, color=colour)
    axes.set_xticks(range(len(columns)), columns)
    axes.set_yticks(range(len(rows)), rows)
    axes.grid(visible=False)
