"""The plots of the decision: acceptance by draft length, and every load at every draft length."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from drafthead.evaluation.decision.analysis import Analysis
from drafthead.evaluation.decision.pricing import Priced
from drafthead.evaluation.reporting.plotting import BETTER, UNRESOLVED, WORSE, Picture, colour_of, legend_above, picture
from drafthead.evaluation.results.levels import THROUGHPUT, Level
from drafthead.evaluation.workload import NAMES

_CHANGE = LinearSegmentedColormap.from_list("change", [WORSE, "#f4f5f7", BETTER])
_INK = "#1d2228"  # on light cells, whatever the theme


def decision_pictures(analysis: Analysis) -> list[Picture]:
    """Those whose data is there: acceptance by K from two draft lengths on, matrices from two workloads on."""
    levels, found = analysis.levels, []
    if any(len(lengths) > 1 for lengths in _lengths_by_method(levels).values()):
        found.append(
            picture(
                "acceptance-k",
                "Acceptance length over draft length under load; the band spans the loads.",
                lambda figure: _acceptance_by_length(figure.subplots(), levels),
            )
        )
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
    if len({level.workload for level in levels}) > 1:
        for method, K in dict.fromkeys((level.method, level.K) for level in levels):
            own = [level for level in levels if (level.method, level.K) == (method, K)]
            found.append(
                picture(
                    f"matrix-{method}-k{K}",
                    f"{NAMES[method]}, K = {K}: output throughput against the baseline (%) by workload and load.",
                    lambda figure, own=own: _matrix(figure, own),  # type: ignore[misc]
                    size=(7.2, 1.4 + 0.42 * len({level.workload for level in own})),
                )
            )
    return found


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
