"""What tokens and heads cost: price per million tokens, and how long a head takes to pay for its training."""

from drafthead.artifacts import MANIFEST, read_json
from drafthead.config import Recipe
from drafthead.evaluation.results.levels import THROUGHPUT, Level

SECONDS_PER_HOUR = 3600


def cost_per_million(price_per_gpu_hour: float, gpus: int, tokens_per_s: float) -> float:
    """Price of 10⁶ tokens: price per GPU and hour × GPUs / tokens per hour, in the currency of the price."""
    return price_per_gpu_hour * gpus / (tokens_per_s * SECONDS_PER_HOUR) * 1e6


def mixed_throughput(levels: list[Level], shares: dict[int, float], up_to: int | None = None) -> tuple[float, float]:
    """Output tokens per second over the traffic, baseline and head.

    At a share w of its time the baseline makes w · throughput tokens; the head needs w / speedup for them. Above
    `up_to` requests in flight nothing is drafted, so nothing is saved.
    """
    tokens = seconds = total = 0.0
    for level in levels:
        baseline, head = level.values[THROUGHPUT.key]
        share = shares.get(level.concurrency, 0.0)
        drafted = up_to is None or level.concurrency <= up_to
        tokens += share * baseline
        seconds += share * (baseline / head if drafted else 1)
        total += share
    return tokens / total, tokens / seconds


def payback_text(recipe: Recipe, levels: list[Level], resolved: bool, up_to: int | None = None) -> str:
    """What training took and when the head has earned it; empty where that is not known.

    Args:
        recipe: its price, traffic and head, whose manifest says how long it was trained.
        levels: that were measured and reached, of the method and K that the verdict is about.
        resolved: whether the change of throughput is.
        up_to: c* of a verdict that has one.
    """
    manifest = recipe.head_dir / MANIFEST
    training = read_json(manifest)["counts"].get("training") if manifest.exists() else None
    if training is None:  # not trained here, or before times were kept
        return ""
    hours, ranks = training["seconds"] / SECONDS_PER_HOUR, training["ranks"]
    trained = f"Training took {ranks * hours:,.2f} device hours ({ranks} × {hours:,.2f} h)"
    price, tokens = recipe.eval.price_per_gpu_hour, recipe.eval.traffic.output_tokens_per_day
    shares = recipe.eval.traffic.shares(tuple(level.concurrency for level in levels))
    levels = [level for level in levels if level.concurrency in shares]
    if price is None or tokens is None or not levels:
        return f"{trained}; eval.price_per_gpu_hour and eval.traffic.output_tokens_per_day give the payback time."
    gpus, cost = recipe.engine.tensor_parallel_size, price * ranks * hours
    without, with_head = (cost_per_million(price, gpus, rate) for rate in mixed_throughput(levels, shares, up_to))
    saved = (without - with_head) * tokens / 1e6
    spent = f"{trained}, {cost:,.2f} at that price; responses and states come on top"
    if not resolved:
        return f"{spent}. Whether it saves anything is unresolved, so there is no payback time."
    daily = f"{spent}. At {tokens:,.0f} output tokens a day"
    if saved <= 0:
        return f"{daily} serving gets dearer by {-saved:,.2f} a day."
    return f"{daily} it saves {saved:,.2f} a day and is paid back after {cost / saved:,.1f} days."
