"""Draft weights in fp8, as vLLM 0.32 serves them: compressed-tensors, e4m3 with a scale per output channel.

The projections of attention and MLP are quantised, from the float32 masters; vLLM rounds their inputs to e4m3 as well,
with a scale per token, when it runs (W8A8). fc, lm_head, norms and maps stay bf16: fc reads raw residual streams, whose
outliers a scale per token has to cover, and lm_head decides between tokens of nearly equal probability. Given up: they
are 38 % of a gpt-oss-120b head, whose file shrinks to 69 % of its size in bf16, not to half. The alternative,
`quant_method: fp8`, knows one scale per matrix only and refuses float32 activations.
"""

from typing import Any

import torch
from torch import Tensor

from drafthead.data.shard import FP8, quantise

METHOD = "compressed-tensors"
_QUANTISED = "_proj.weight"
_SCALE = "_scale"


def quantisation_config() -> dict[str, Any]:
    """What config.json says of the weights, for vLLM and compressed-tensors."""
    e4m3 = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**e4m3, "strategy": "channel", "dynamic": False},
        "input_activations": {**e4m3, "strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": METHOD,
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*fc$"],
    }


def quantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A checkpoint's tensors as the file holds them.

    Args:
        tensors: float32 parameters, with or without d2t and t2d.

    Returns:
        Projections (out, in) as e4m3, each with its `weight_scale` (out, 1) in float32; other parameters in bf16.
    """
    written: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name.endswith(_QUANTISED):
            values, scale = quantise(tensor)
            written |= {name: values, name + _SCALE: scale[:, None]}
        else:
            written[name] = tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor
    return written


def dequantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """A file's tensors with every e4m3 weight multiplied out in float32, and without scales.

    Raises:
        ValueError: a weight in e4m3 has no scale, or one that is neither a number nor one per output channel.
    """
    in_fp8 = [name for name, tensor in tensors.items() if tensor.dtype == FP8]
    scales = {name + _SCALE for name in in_fp8}
    plain = {name: tensor for name, tensor in tensors.items() if name not in scales}
    for name in in_fp8:
        scale = tensors.get(name + _SCALE)
        rows = plain[name].shape[0]
        if scale is None or scale.numel() not in (1, rows):
            found = "none" if scale is None else f"one of shape {tuple(scale.shape)}"
            raise ValueError(f"{name} is in fp8 and needs {name + _SCALE} of shape ({rows}, 1): found {found}")
        plain[name] = plain[name].float() * scale.float().reshape(-1, 1)
    return plain
