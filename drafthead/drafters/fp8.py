"""Eight-bit numbers: e4m3 values with a float32 scale per row, of hidden states and of draft weights.

A row is scaled so that its largest entry meets the largest e4m3 number. Three bits of mantissa leave a relative error
of 2.6 % (root mean square, measured on states of the embedded target).

Draft weights in fp8 are written as vLLM 0.32 serves them: compressed-tensors, one scale per output channel. The
projections of attention and MLP are quantised, from the float32 masters; vLLM rounds their inputs to e4m3 as well, with
a scale per token, when it runs (W8A8). fc, lm_head, norms and maps stay bf16: fc reads raw residual streams, whose
outliers a scale per token has to cover, and lm_head decides between tokens of nearly equal probability. Given up: they
are 38 % of a gpt-oss-120b head, whose file shrinks to 69 % of its size in bf16, not to half. The alternative,
`quant_method: fp8`, knows one scale per matrix only and refuses float32 activations.
"""

from typing import Any

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
_LARGEST = torch.finfo(FP8).max  # 448
_SCALE = "_scale"


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(T, H) of any float type -> (T, H) e4m3 and (T,) float32 scales. A row that is not finite stays so."""
    wide = rows.float()
    largest = wide.abs().amax(-1)
    scale = torch.where(largest == 0, 1.0, largest / _LARGEST)
    return (wide / scale[:, None]).to(FP8), scale


def quantisation(dtype: str) -> dict[str, Any]:
    """What config.json states about weights in `export.dtype`, for vLLM and compressed-tensors; of fp8 only."""
    if dtype != "fp8":
        return {}
    e4m3 = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {**e4m3, "strategy": "channel", "dynamic": False},
        "input_activations": {**e4m3, "strategy": "token", "dynamic": True},
    }
    config = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*fc$"],
    }
    return {"quantization_config": config}


def cast(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """A checkpoint's tensors as a file in `export.dtype` holds them.

    Args:
        tensors: float32 parameters, with or without d2t and t2d, which stay as they are.
        dtype: "bfloat16", "float32", or "fp8": projections (out, in) as e4m3, each with its `weight_scale` (out, 1) in
            float32, and all other parameters in bf16.
    """
    of_floats = torch.float32 if dtype == "float32" else torch.bfloat16
    written = {name: t.to(of_floats) if t.is_floating_point() else t for name, t in tensors.items()}
    for name in tensors:
        if dtype == "fp8" and name.endswith("_proj.weight"):
            written[name], scale = quantise(tensors[name])
            written[name + _SCALE] = scale[:, None]
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


def as_served(tensors: dict[str, Tensor], dtype: str) -> dict[str, Tensor]:
    """A checkpoint's tensors with the values that the file in `export.dtype` holds, as float32."""
    written = dequantised(cast(tensors, dtype))
    return {name: t.float() if t.is_floating_point() else t for name, t in written.items()}
