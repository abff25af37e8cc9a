"""What every plot of the report shares: themes, colours, and drawing once for a light and once for a dark page."""

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from drafthead.config.evaluation import OWN
from drafthead.evaluation.workload import BASELINE

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
