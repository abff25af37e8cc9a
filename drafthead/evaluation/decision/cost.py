"""What tokens and heads cost: price per million tokens, and how long a head takes to pay for its training."""

import math
from dataclasses import dataclass

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
