"""What tokens and heads cost: price per million tokens, and how long a head takes to pay for its training."""

import math
from dataclasses import dataclass

from drafthead.artifacts import MANIFEST, read_json
from drafthead.config import Recipe
from drafthead.evaluation.results.levels import THROUGHPUT, Level

SECONDS_PER_HOUR = 3600


def cost_per_million(price_per_gpu_hour: float, gpus: int, tokens_per_s: float) -> float:
    """Price of 10⁶ tokens: price per GPU and hour × GPUs / tokens per hour, in the currency of the price."""
    return price_per_gpu_hour * gpus / (tokens_per_s * SECONDS_PER_HOUR) * 1e6


@dataclass(frozen=True)
class Payback:
    """When a head has earned what it cost.

    Attributes:
        cost: of training, in the currency of the price.
        saved_per_day: at the traffic's tokens per day; negative when the head makes serving dearer.
        days: cost / saved_per_day; infinite when nothing is saved.
    """

    cost: float
    saved_per_day: float
    days: float


def payback(training_cost: float, tokens_per_day: float, baseline_cost: float, head_cost: float) -> Payback:
    """Payback time of a head.

    Args:
        training_cost: once.
        tokens_per_day: output tokens that the deployment serves.
        baseline_cost, head_cost: per 10⁶ output tokens, without and with the head.
    """
    saved = (baseline_cost - head_cost) * tokens_per_day / 1e6
    return Payback(training_cost, saved, training_cost / saved if saved > 0 else math.inf)


# What training a head cost, from its manifest, and when it has paid for itself at the user's traffic.


@dataclass(frozen=True)
class TrainingCost:
    """GPU time of one training run."""

    seconds: float
    ranks: int

    @property
    def gpu_hours(self) -> float:
        return self.seconds * self.ranks / SECONDS_PER_HOUR


def training_cost(recipe: Recipe) -> TrainingCost | None:
    """From the head's manifest; None for a head that was not trained here, or before times were kept."""
    path = recipe.head_dir / MANIFEST
    counts = read_json(path)["counts"] if path.exists() else {}
    found = counts.get("training")
    return TrainingCost(found["seconds"], found["ranks"]) if found else None


def mixed_throughput(levels: list[Level], shares: dict[int, float], up_to: int | None = None) -> tuple[float, float]:
    """Output tokens per second over the traffic, baseline and head.

    At a share w of its time the baseline makes w · throughput tokens; the head needs w / speedup for them. Above
    `up_to` requests in flight nothing is drafted, so nothing is saved.
    """
    tokens = seconds = 0.0
    for level in levels:
        baseline, head = level.values[THROUGHPUT.key]
        if up_to is not None and level.concurrency > up_to:
            head = baseline
        share = shares.get(level.concurrency, 0.0)
        tokens += share * baseline
        seconds += share * baseline / head
    total = sum(shares.get(level.concurrency, 0.0) for level in levels)
    return tokens / total, tokens / seconds


def earned(recipe: Recipe, levels: list[Level], up_to: int | None = None) -> tuple[TrainingCost, Payback] | None:
    """The payback of the head over the traffic; None without a price, a daily amount, or a known cost.

    Args:
        recipe: its price, traffic and head.
        levels: that were measured and reached, of the method and K that the verdict is about.
        up_to: c* of a verdict that has one.
    """
    price, tokens = recipe.eval.price_per_gpu_hour, recipe.eval.traffic.output_tokens_per_day
    cost = training_cost(recipe)
    shares = recipe.eval.traffic.shares(tuple(level.concurrency for level in levels))
    levels = [level for level in levels if level.concurrency in shares]
    if price is None or tokens is None or cost is None or not levels:
        return None
    gpus = recipe.engine.tensor_parallel_size
    costs = [cost_per_million(price, gpus, rate) for rate in mixed_throughput(levels, shares, up_to)]
    return cost, payback(price * cost.gpu_hours, tokens, *costs)


def payback_text(recipe: Recipe, levels: list[Level], resolved: bool, up_to: int | None = None) -> str:
    """The payback in a sentence; what is missing for it otherwise; empty where nothing is known at all.

    Args:
        recipe, levels, up_to: as in `earned`.
        resolved: whether the change of throughput is.
    """
    cost = training_cost(recipe)
    if cost is None:
        return ""
    hours = f"{cost.ranks} × {cost.seconds / SECONDS_PER_HOUR:,.2f} h"
    trained = f"Training took {cost.gpu_hours:,.2f} device hours ({hours})"
    found = earned(recipe, levels, up_to)
    if found is None:
        return f"{trained}; eval.price_per_gpu_hour and eval.traffic.output_tokens_per_day give the payback time."
    _, back = found
    daily = f"At {recipe.eval.traffic.output_tokens_per_day:,.0f} output tokens a day"
    spent = f"{trained}, {back.cost:,.2f} at that price; responses and states come on top"
    if not resolved:
        return f"{spent}. Whether it saves anything is unresolved, so there is no payback time."
    if back.saved_per_day <= 0:
        return f"{spent}. {daily} serving gets dearer by {-back.saved_per_day:,.2f} a day."
    return f"{spent}. {daily} it saves {back.saved_per_day:,.2f} a day and is paid back after {back.days:,.1f} days."
