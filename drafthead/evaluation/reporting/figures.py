"""The plots of acceptance: by workload, and by draft position."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drafthead.config.evaluation import ALL, OWN
from drafthead.evaluation.results.summary import AcceptanceSummary
from drafthead.evaluation.workload import BASELINE, NAMES

PALETTE = {OWN: "#2f6fde", "ngram": "#d9822b", BASELINE: "#7a7f87"}
_OTHERS = ("#8a56c2", "#1f9e9e", "#c2568a", "#7d9e1f", "#5668c2")
BETTER, WORSE, UNRESOLVED = "#2e9e5b", "#d64545", "#9aa0a6"
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


def picture(
    name: str, caption: str, draw: Callable[[Figure], None], size: tuple[float, float] = (7.2, 3.4), wide: bool = False
) -> Picture:
    return Picture(name, caption, _render(draw, size, "light"), _render(draw, size, "dark"), wide)


def _render(draw: Callable[[Figure], None], size: tuple[float, float], theme: str) -> bytes:
    colours = _THEMES[theme]
    style: dict[Any, Any] = {
        "font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
        "text.parse_math": False,  # a dollar in the name of a source is a dollar
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


def colour_of(method: str, methods: Sequence[str]) -> str:
    """The method's colour: fixed for those every recipe has, else by its place among the others."""
    others = [name for name in methods if name not in PALETTE]
    return PALETTE.get(method) or _OTHERS[others.index(method) % len(_OTHERS)]


def legend_above(axes: Axes) -> None:
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, borderaxespad=0.2)


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
