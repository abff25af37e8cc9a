"""Whole weights out of an engine that may have cut them up."""

from typing import Any

import torch
from torch import Tensor

from drafthead.training.optimizer import EMA_STATE
from drafthead.training.run import Run


def consolidated(run: Run, averaged: bool = False) -> dict[str, Tensor]:
    """float32 weights on the CPU under their exported names, with d2t and t2d. Every rank calls this.

    Args:
        run: the run.
        averaged: the moving average (train.ema_decay) instead of the weights that are trained.
    """
    weights = {}
    for name, parameter in run.accelerator.unwrap_model(run.engine).draft.named_parameters():
        whole = _averaged(run, parameter) if averaged else _master(parameter)
        weights[name] = whole.detach().float().cpu().clone()
    return {**weights, "d2t": run.vocabulary.d2t, "t2d": run.vocabulary.t2d}


def _master(parameter: Any) -> Tensor:
    from deepspeed.utils import safe_get_full_fp32_param

    master = safe_get_full_fp32_param(parameter)
    return parameter if master is None else master  # without a ZeRO optimiser the parameter is the master


def _averaged(run: Run, parameter: torch.nn.Parameter) -> Tensor:
    from deepspeed.utils import safe_get_full_optimizer_state

    whole = safe_get_full_optimizer_state(parameter, EMA_STATE)
    return run.engine.optimizer.state[parameter][EMA_STATE] if whole is None else whole
