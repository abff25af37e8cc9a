"""What is wrong with the figures of public posts in docs/published.yaml, wherever arithmetic can show it.

    python tools/check_published.py

Each check looks for a kind of error, not for the one post that is known to have it: a figure added there is checked
too.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

from drafthead.evaluation.reporting.published import Figure, figures, published
from drafthead.evaluation.results.levels import cost_per_million

# Half width of the 95 % interval of a P95 over 100 requests, at its narrowest.
_P95_NOISE_OF_100 = 0.12


@dataclass(frozen=True)
class Erratum:
    """One thing a reader must not copy: the post, the figure as it stands there, and what is wrong with it."""

    post: str
    what: str
    why: str


def errata() -> list[Erratum]:
    """Every error found, computed ones first."""
    errors = [erratum for figure in figures() for check in (_wrong_percent, _unresolved) for erratum in check(figure)]
    errors += [*_node_price(), *_totals(), *_speedups(), *_training_price(), *_without_bonus(), *_never_in_flight()]
    return errors + [Erratum(**entry) for entry in published()["errata"]]


def half_step(text: str) -> float:
    """Half a unit of the last printed digit."""
    return 0.5 * 10.0 ** -len(text.partition(".")[2])


def percent_bounds(figure: Figure) -> tuple[float, float]:
    """Bounds of 100 · (head - baseline) / baseline over everything that rounds to the printed figures."""
    (b, h), (db, dh) = map(float, (figure.baseline, figure.head)), map(half_step, (figure.baseline, figure.head))
    return 100 * ((h - dh) / (b + db) - 1), 100 * ((h + dh) / (b - db) - 1)


def _wrong_percent(figure: Figure) -> Iterator[Erratum]:
    """A percentage that its two figures do not give; posts print a reduction of a time without its sign."""
    if not figure.percent:
        return
    low, high = percent_bounds(figure)
    what = f"{figure.name}: {figure.baseline} → {figure.head} printed as {figure.percent} %"
    printed, slack = float(figure.percent), half_step(figure.percent)
    if figure.lower_is_better and figure.change.value < 0 < printed:
        yield Erratum(figure.post, what, f"it is a regression: {figure.change.amount()}")
        return
    if figure.lower_is_better:
        low, high = -high, -low
    if not low - slack <= printed <= high + slack:
        yield Erratum(figure.post, what, f"the printed figures give {low:+.2f} to {high:+.2f} %")


def _unresolved(figure: Figure) -> Iterator[Erratum]:
    """A difference of P95s below their noise: that of one level, over √levels in a geometric mean, of two of them."""
    post = published()["posts"][figure.post]
    if "_p95" not in figure.measure or figure.statistic != "geomean":
        return
    levels = len(post["concurrency"])
    noise = _P95_NOISE_OF_100 * math.sqrt(100 / post["prompts_per_level"]) * math.sqrt(2 / levels)
    if abs(figure.change.value) < noise:
        yield Erratum(
            figure.post,
            f"{figure.name}: {figure.change.amount()}",
            f"unresolved: a P95 of {post['prompts_per_level']} requests has an interval of ±12 % at best, the ratio of "
            f"two means over {levels} levels one of ±{noise:.0%} (less as far as pairing by prompt helps)",
        )


def _pairs(measure: str) -> dict[tuple, Figure]:
    """(post, workload, GPUs, K, head, statistic) -> its figure of a measure."""
    return {(f.post, f.workload, f.gpus, f.K, f.method, f.statistic): f for f in figures() if f.measure == measure}


def _node_price() -> Iterator[Erratum]:
    speeds = _pairs("output_tokens_per_s")
    for key, cost in _pairs("cost_per_million").items():
        post = published()["posts"][cost.post]
        price, gpus = post["node_price_per_hour"], post["node_gpus"]
        for side in ("baseline", "head"):
            printed, tokens_per_s = getattr(cost, side), float(getattr(speeds[key], side))
            if cost.gpus < gpus and abs(cost_per_million(price, 1, tokens_per_s) - float(printed)) <= half_step(
                printed
            ):
                yield Erratum(
                    cost.post,
                    f"{cost.workload}, {side}: {printed} per 1M output tokens at {tokens_per_s} tok/s",
                    f"charges a node of {gpus} GPUs ({price} per hour) for {cost.gpus}; per GPU it is "
                    f"{cost_per_million(price / gpus, cost.gpus, tokens_per_s):.2f}",
                )


def _totals() -> Iterator[Erratum]:
    """Random prompts as long as their responses: the total is twice the output."""
    totals = _pairs("total_tokens_per_s")
    for key, output in _pairs("output_tokens_per_s").items():
        if output.workload != "random" or key not in totals:
            continue
        twice, total = 2 * float(output.head), float(totals[key].head)
        if abs(total / twice - 1) > 0.005:
            yield Erratum(
                output.post,
                f"{output.name}: total {totals[key].head} tok/s",
                f"prompts and responses of 1024 tokens give twice the output, {twice:.2f}",
            )


def _speedups() -> Iterator[Erratum]:
    """Requests per hour and a speedup at the same load must agree."""
    hourly = _pairs("requests_per_hour")
    for key, speedup in _pairs("e2e_speedup").items():
        if key in hourly and abs((1 + hourly[key].change.value) / float(speedup.head) - 1) > 0.05:
            yield Erratum(
                speedup.post,
                f"{speedup.name}: {speedup.head}",
                f"requests per hour at that load, {hourly[key].baseline} → {hourly[key].head}, give "
                f"{1 + hourly[key].change.value:.2f}",
            )


def _training_price() -> Iterator[Erratum]:
    for entry in published()["training"]:
        post = published()["posts"][entry["post"]]
        paid, price = entry["cost"] / entry["gpu_hours"], post["node_price_per_hour"] / post["node_gpus"]
        if abs(paid / price - 1) > 0.05:
            yield Erratum(
                entry["post"],
                f"training of {entry['head']}: {entry['cost']} $ for {entry['gpu_hours']} h on one GPU",
                f"is {paid:.2f} $ an hour, the post's own price is {price:.2f}",
            )


def _without_bonus() -> Iterator[Erratum]:
    for entry in published()["acceptance"]:
        if not entry.get("counts_bonus", True):
            yield Erratum(
                entry["post"],
                f"acceptance length {entry['length']} at K = {entry['K']}",
                f"leaves out the target's own token; 1 + accepted / drafts is {float(entry['length']) + 1:.2f}",
            )
        if "meaningless" in entry:
            yield Erratum(
                entry["post"], f"acceptance length {entry['length']}", f"means nothing: {entry['meaningless']}"
            )


def _never_in_flight() -> Iterator[Erratum]:
    for name, post in published()["posts"].items():
        for level in post.get("concurrency", ()):
            if level > post["prompts_per_level"]:
                yield Erratum(
                    name,
                    f"concurrency {level} with {post['prompts_per_level']} prompts",
                    f"never more than {post['prompts_per_level']} requests were in flight",
                )


if __name__ == "__main__":
    for erratum in errata():
        print(f"{erratum.post}: {erratum.what}\n    {erratum.why}")
