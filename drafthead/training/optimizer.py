"""The optimiser: AdamW, or Muon for matrices with AdamW for the rest.

Learning rates are a pure function of the step, set on the parameter groups before it; so a resumed run needs no
scheduler state.

Muon replaces a matrix's momentum by its nearest orthogonal matrix (Newton-Schulz iteration). It needs
whole matrices, which ZeRO cuts up; DeepSpeed's own implementation gathers them. Its gradient norm is that
of the orthogonalised update, which is not clipped.
"""

import math
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW

from drafthead.config.train import TrainConfig
from drafthead.drafters.base import DraftModule
from drafthead.drafters.layers import Projection

MAX_GRAD_NORM = 1.0
_BETAS = (0.9, 0.95)
_MOMENTUM = 0.9  # of Muon; its usual 0.95 loses 1 to 4 % of acceptance length in 500 steps: docs/quality.md
_WARMUP = 0.03  # of the steps


def build_optimizer(config: TrainConfig, draft: DraftModule) -> torch.optim.Optimizer:
    """The recipe's optimiser over all parameters of a head.

    Args:
        config: train section of the recipe.
        draft: head to train; Muon updates its projections from hidden states to hidden states.
    """
    adam = {"lr": config.learning_rate, "initial_lr": config.learning_rate, "weight_decay": 0.0}
    if config.optimizer == "muon":
        optimizer = _muon(config, draft, adam)
    else:
        # Fused: one pass, no temporaries of the weights' size.
        optimizer = AdamW([{"params": list(draft.parameters()), **adam}], betas=_BETAS, fused=True)
    if config.zero_stage == 0:
        optimizer.register_step_pre_hook(_clip)
    return optimizer


def _muon(config: TrainConfig, draft: DraftModule, adam: dict[str, float]) -> torch.optim.Optimizer:
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    projections = {f"{name}.weight" for name, module in draft.named_modules() if isinstance(module, Projection)}
    projections -= {*draft.draft_rows}
    matrices: list[nn.Parameter] = []
    remaining: list[nn.Parameter] = []
    for name, parameter in draft.named_parameters():
        suits = name in projections
        setattr(parameter, "use_muon", suits)  # noqa: B010 - DeepSpeed reads it off the parameter
        (matrices if suits else remaining).append(parameter)
    rate = config.muon_learning_rate
    muon = {"lr": rate, "initial_lr": rate, "momentum": _MOMENTUM, "weight_decay": 0.0, "ns_method": _iteration(config)}
    return MuonWithAuxAdam([
        {"params": matrices, "use_muon": True, **muon},
        {"params": remaining, "use_muon": False, **adam, "betas": _BETAS, "eps": 1e-8},
    ])  # fmt: skip


def _iteration(config: TrainConfig) -> str:
    """Which of DeepSpeed's Newton-Schulz iterations Muon runs: `gram` in float16, or in float32 where a CPU has no
    instructions for that, a sixth of a bf16 step; `standard` in bfloat16."""
    fast = not torch.cuda.is_available() and torch.cpu._is_avx512_bf16_supported()  # so is every CPU with AMX
    return "standard" if fast and config.precision == "bf16" else "gram"


def schedule(optimizer: torch.optim.Optimizer, config: TrainConfig, step: int, total_steps: int) -> float:
    """Set the groups' learning rates for a step; returns the rate of the first AdamW group.

    Args:
        optimizer: optimiser from `build_optimizer`, or accelerate's wrapper of it.
        config: train section of the recipe.
        step: number of the optimiser step, from 0.
        total_steps: number of optimiser steps of the run.
    """
    share = rate_share(config, step, total_steps)
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * share
    return config.learning_rate * share


def rate_share(config: TrainConfig, step: int, total_steps: int) -> float:
    """Share of the peak learning rate at a 0-based step.

    Linear warm-up, then a cosine to a tenth; with a decay ratio warm-up, a constant rate, and over the last share of
    the steps a straight line to zero (WSD: Hu et al., MiniCPM, arXiv 2404.06395).
    """
    warmup = max(1, round(_WARMUP * total_steps))
    if step < warmup:
        return (step + 1) / warmup
    if config.decay_ratio is not None:
        return min(1.0, (total_steps - step) / max(1, round(config.decay_ratio * total_steps)))
    progress = (step - warmup) / max(1, total_steps - warmup)
    return 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress))


def gradient_norm(engine: Any) -> float:
    """Norm of the last step's gradient before clipping, the same on every rank."""
    norm = engine.get_global_grad_norm()  # None at ZeRO 0
    return float(engine.optimizer.grad_norm if norm is None else norm)


def _clip(optimizer: Any, args: tuple, kwargs: dict) -> None:
    """Before a step at ZeRO 0: what a ZeRO optimiser does itself."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.grad_norm = nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
