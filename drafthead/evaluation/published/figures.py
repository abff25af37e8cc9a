"""Published figures, read as data and recomputed: their percentages, costs, and the errors a reader must not copy.

Numbers are kept as the text that was printed, because the number of digits says how far a figure can be trusted:
a percentage agrees with its two figures when some pair of values that rounds to them gives it.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from typing import Any

import yaml

from drafthead.evaluation.decision.cost import cost_per_million

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


# Where published figures go wrong, found by computing on them wherever arithmetic can show it.
#
# Each check looks for a kind of error, not for the one post that is known to have it: a figure added to figures.yaml is
# checked too.

# Half width of the 95 % interval of a P95 over 100 requests, at its narrowest.
_P95_NOISE_OF_100 = 0.12


@dataclass(frozen=True)
class Erratum:
    """One thing a reader must not copy.

    Attributes:
        post: which post.
        what: the figure or statement as it stands there.
        why: what is wrong with it, with the right value where one follows.
    """

    post: str
    what: str
    why: str


def find_errata(source: Published | None = None) -> list[Erratum]:
    """Every error in the published figures, computed ones first."""
    source = source or published()
    found = [
        erratum
        for comparison in source.comparisons
        for check in (_wrong_sign, _wrong_percent, _swapped, _unresolved, _node_price)
        for erratum in check(comparison, source)
    ]
    found += [erratum for entry in source.acceptance for erratum in _without_bonus(entry)]
    found += list(_never_in_flight(source))
    return found + [Erratum(**entry) for entry in source.errata]


def _name(comparison: Comparison, measure: str) -> str:
    return f"{comparison.workload}, {comparison.gpus} GPU(s), {measure}"


def _as_printed(comparison: Comparison, figure: Figure) -> str:
    assert figure.printed
    return (
        f"{_name(comparison, figure.measure)}: {figure.baseline.text} → {figure.head.text} printed as "
        f"{figure.printed.text} %"
    )


def _wrong_sign(comparison: Comparison, _: Published) -> Iterator[Erratum]:
    for figure in comparison.figures:
        # A printed gain where the figures are worse; posts print a reduction of a time either way.
        if figure.printed and figure.lower_is_better and figure.printed.value > 0 and figure.change < 0:
            yield Erratum(
                comparison.post,
                _as_printed(comparison, figure),
                f"it is a regression; positive = better makes it {figure.change:+.1%}",
            )


def _wrong_percent(comparison: Comparison, _: Published) -> Iterator[Erratum]:
    for figure in comparison.figures:
        if figure.printed and not figure.percent_agrees:
            low, high = figure.arithmetic_percent
            yield Erratum(
                comparison.post,
                _as_printed(comparison, figure),
                f"the printed figures give {low:+.2f} to {high:+.2f} %",
            )


def _swapped(comparison: Comparison, _: Published) -> Iterator[Erratum]:
    if comparison.swapped:
        right = ", ".join(f"{m} {comparison.of(m).change:+.1%}" for m in comparison.swapped)
        yield Erratum(
            comparison.post,
            f"{comparison.workload}, {comparison.gpus} GPU(s): percentages of {' and '.join(comparison.swapped)}",
            f"printed each beside the other; from the figures: {right}",
        )


def _unresolved(comparison: Comparison, source: Published) -> Iterator[Erratum]:
    post = source.posts[comparison.post]
    if post.get("paired", True):
        return
    # Two unpaired P95s differ by the noise of both.
    noise = math.sqrt(2) * _P95_NOISE_OF_100 * math.sqrt(100 / post["prompts_per_level"])
    for figure in comparison.figures:
        if figure.measure.startswith("ttft_p95") and abs(figure.change) < noise:
            yield Erratum(
                comparison.post,
                f"{_name(comparison, figure.measure)}: {figure.change:+.1%}",
                f"unresolved: a P95 of {post['prompts_per_level']} unpaired requests at a level has an interval of "
                f"±12 % at best, so the ratio of two one of ±{noise:.0%}",
            )


def _node_price(comparison: Comparison, source: Published) -> Iterator[Erratum]:
    price = source.posts[comparison.post].get("node_price_per_hour")
    gpus = source.posts[comparison.post].get("node_gpus", 1)
    costs = [f for f in comparison.figures if f.measure == "cost_per_million"]
    if price is None or not costs:
        return
    speed = comparison.of("output_tokens_per_s")
    for side in ("baseline", "head"):
        printed, tokens_per_s = getattr(costs[0], side), getattr(speed, side).value
        charged = cost_per_million(price, 1, tokens_per_s)
        if printed.low <= charged <= printed.high and comparison.gpus < gpus:
            right = cost_per_million(price / gpus, comparison.gpus, tokens_per_s)
            yield Erratum(
                comparison.post,
                f"{comparison.workload}, {side}: {printed.text} per 1M output tokens at {tokens_per_s} tok/s",
                f"charges a node of {gpus} GPUs ({price} per hour) for {comparison.gpus}; per GPU it is {right:.2f}",
            )


def _without_bonus(entry: Acceptance) -> Iterator[Erratum]:
    # 1 + accepted / drafts is never below 1.
    if not entry.counts_bonus or entry.length.value < 1:
        yield Erratum(
            entry.post,
            f"acceptance length {entry.length.text} at K = {entry.K}",
            f"leaves out the target's own token; 1 + accepted / drafts is {entry.corrected:.2f}",
        )


def _never_in_flight(source: Published) -> Iterator[Erratum]:
    for name, post in source.posts.items():
        for level in post.get("concurrency", ()):
            if level > post["prompts_per_level"]:
                yield Erratum(
                    name,
                    f"concurrency {level} with {post['prompts_per_level']} prompts",
                    f"never more than {post['prompts_per_level']} requests were in flight",
                )
