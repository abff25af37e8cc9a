"""Where published figures go wrong, found by computing on them wherever arithmetic can show it.

Each check looks for a kind of error, not for the one post that is known to have it: a figure added to figures.yaml is
checked too.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from drafthead.evaluation.decision.cost import cost_per_million
from drafthead.evaluation.published.figures import Acceptance, Comparison, Figure, Published, published

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
    for arm in ("baseline", "head"):
        printed, tokens_per_s = getattr(costs[0], arm), getattr(speed, arm).value
        charged = cost_per_million(price, 1, tokens_per_s)
        if printed.low <= charged <= printed.high and comparison.gpus < gpus:
            right = cost_per_million(price / gpus, comparison.gpus, tokens_per_s)
            yield Erratum(
                comparison.post,
                f"{comparison.workload}, {arm}: {printed.text} per 1M output tokens at {tokens_per_s} tok/s",
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
