"""The plots of acceptance: by workload, and by draft position."""

import numpy as np
from matplotlib.axes import Axes

from drafthead.evaluation.reporting.plotting import Picture, colour_of, legend_above, picture
from drafthead.evaluation.results.summary import ALL, AcceptanceSummary
from drafthead.evaluation.workload import NAMES


def acceptance_pictures(summary: AcceptanceSummary) -> list[Picture]:
    """Acceptance length by workload, and acceptance by draft position."""
    return [
        picture(
            "acceptance-length",
            "Acceptance length by workload with 95 % intervals; 1.0 means that no draft was accepted.",
            lambda figure: _lengths(figure.subplots(), summary),
        ),
        picture(
            "acceptance-position",
            "Share of drafts accepted up to each position (solid), and given that the position before was (dashed).",
            lambda figure: _positions(figure.subplots(), summary),
        ),
    ]


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
        axes.errorbar(value, at, xerr=reach, fmt="o", capsize=3, color=colour_of(method, methods), label=NAMES[method])
    axes.set(yticks=range(len(categories)), yticklabels=categories, xlabel="acceptance length (tokens, bonus included)")
    axes.set_xlim(left=1.0)
    axes.invert_yaxis()
    legend_above(axes)


def _positions(axes: Axes, summary: AcceptanceSummary) -> None:
    methods = _methods(summary)
    for method in methods:
        positions = summary.of(method).positions
        at = np.arange(1, len(positions.unconditional) + 1)
        axes.plot(at, 100 * positions.unconditional, "o-", color=colour_of(method, methods), label=NAMES[method])
        axes.plot(at, 100 * positions.conditional, "o--", color=colour_of(method, methods), alpha=0.6)
    longest = max(m.K for m in summary.methods)
    axes.set(xticks=range(1, longest + 1), xlabel="draft position", ylabel="accepted (%)", ylim=(0, 100))
    legend_above(axes)
