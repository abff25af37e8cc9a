"""Published figures, read as data and recomputed: their percentages, costs, and the errors a reader must not copy.

Numbers are kept as the text that was printed, because the number of digits says how far a figure can be trusted:
a percentage agrees with its two figures when some pair of values that rounds to them gives it.
"""

from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

LOWER_IS_BETTER = ("ttft", "tpot", "itl", "e2e", "cost")


@dataclass(frozen=True)
class Printed:
    """A number as it was printed; `low` and `high` bound what rounds to it."""

    text: str

    @property
    def value(self) -> float:
        return float(self.text)

    @property
    def half_step(self) -> float:
        """Half a unit of the last digit."""
        decimals = len(self.text.partition(".")[2])
        return 0.5 * 10.0**-decimals

    @property
    def low(self) -> float:
        return self.value - self.half_step

    @property
    def high(self) -> float:
        return self.value + self.half_step


@dataclass(frozen=True)
class Figure:
    """One measure of a comparison.

    Attributes:
        measure: such as ttft_p95_s; the unit is its last part.
        baseline, head: as printed.
        printed: the percentage printed beside them, if there was one.
    """

    measure: str
    baseline: Printed
    head: Printed
    printed: Printed | None = None

    @property
    def lower_is_better(self) -> bool:
        return self.measure.startswith(LOWER_IS_BETTER)

    @property
    def change(self) -> float:
        """Relative change by this project's convention: positive = better; for times baseline / head - 1."""
        ratio = self.head.value / self.baseline.value
        return (1 / ratio if self.lower_is_better else ratio) - 1

    @property
    def arithmetic_percent(self) -> tuple[float, float]:
        """Bounds of 100 · (head - baseline) / baseline over everything that rounds to the printed figures."""
        return 100 * (self.head.low / self.baseline.high - 1), 100 * (self.head.high / self.baseline.low - 1)

    @property
    def percent_agrees(self) -> bool:
        """Whether the printed percentage can come from the printed figures."""
        assert self.printed is not None
        low, high = self.arithmetic_percent
        return low <= self.printed.high and self.printed.low <= high


@dataclass(frozen=True)
class Comparison:
    """Baseline beside head in one post, on one workload."""

    post: str
    workload: str
    gpus: int
    K: int
    statistic: str
    figures: tuple[Figure, ...]
    concurrency: int | None = None
    swapped: tuple[str, ...] = ()

    def of(self, measure: str) -> Figure:
        """The figure of a measure."""
        return next(figure for figure in self.figures if figure.measure == measure)


@dataclass(frozen=True)
class Acceptance:
    """An acceptance length as printed, and whether the post counts the bonus token."""

    post: str
    head: str
    workload: str
    K: int
    length: Printed
    counts_bonus: bool

    @property
    def corrected(self) -> float:
        """1 + accepted / drafts."""
        return self.length.value + (0 if self.counts_bonus else 1)

    @property
    def rate(self) -> float:
        """accepted / proposed, which for drafts of fixed length is (length - 1) / K."""
        return (self.corrected - 1) / self.K


@dataclass(frozen=True)
class Published:
    """Everything in figures.yaml."""

    posts: dict[str, dict[str, Any]]
    comparisons: tuple[Comparison, ...]
    acceptance: tuple[Acceptance, ...]
    step_ratios: tuple[dict[str, Any], ...]
    errata: tuple[dict[str, str], ...] = field(repr=False)


@cache
def published() -> Published:
    """The published figures, as shipped with the package."""
    data = yaml.safe_load(files(__package__).joinpath("figures.yaml").read_text(encoding="utf-8"))
    return Published(
        posts=data["posts"],
        comparisons=tuple(_comparison(entry) for entry in data["comparisons"]),
        acceptance=tuple(Acceptance(**{**e, "length": Printed(e["length"])}) for e in data["acceptance"]),
        step_ratios=tuple(data["step_ratios"]),
        errata=tuple(data["errata"]),
    )


def _comparison(entry: dict[str, Any]) -> Comparison:
    figures = tuple(
        Figure(measure, **{part: Printed(text) for part, text in numbers.items()})
        for measure, numbers in entry["measures"].items()
    )
    rest = {key: value for key, value in entry.items() if key not in ("measures", "swapped")}
    return Comparison(figures=figures, swapped=tuple(entry.get("swapped", ())), **rest)
