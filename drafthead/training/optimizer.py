"""The optimiser: AdamW, and its learning rate as a pure function of the step, so that no scheduler state is resumed."""

import math

import torch
from torch import nn
from torch.optim import AdamW

from drafthead.config import TrainConfig

_BETAS = (0.9, 0.95)


def build_optimizer(config: TrainConfig, draft: nn.Module) -> AdamW:
    """AdamW over all parameters of a head; fused: one pass, no temporaries of the weights' size."""
    return AdamW(draft.parameters(), lr=config.learning_rate, betas=_BETAS, weight_decay=0.0, fused=True)


def schedule(optimizer: torch.optim.Optimizer, config: TrainConfig, step: int, total_steps: int) -> float:
    """Set the learning rate of a step, and return it.

    Args:
        optimizer: from `build_optimizer`, or accelerate's wrapper of it.
        config: the recipe's train section.
        step: 0-based.
        total_steps: of the run.
    """
    rate = config.learning_rate * rate_share(config.warmup_ratio, step, total_steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def rate_share(warmup_ratio: float, step: int, total_steps: int) -> float:
    """Share of the peak learning rate at a 0-based step: linear warm-up, then a cosine to a tenth."""
    warmup = max(1, round(warmup_ratio * total_steps))
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))
