"""Rotary position embedding for any scaling the target uses (plain, YaRN, Llama 3, ...).

Frequencies and the attention factor come from transformers' own table of scaling rules, so a head
rotates exactly as its target does. Rotation is computed in float32 (float64 for float64 inputs).
"""

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def rope_frequencies(config: PretrainedConfig) -> tuple[Tensor, float]:
    """Inverse frequencies (head_dim / 2,) and the factor on cos and sin for a model configuration.

    Args:
        config: needs `rope_parameters`, `head_dim` and `max_position_embeddings`.
    """
    rope_type = config.rope_parameters["rope_type"]
    with torch.device("cpu"):  # real numbers even while a model is built on meta tensors
        if rope_type == "default":
            exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float64) / config.head_dim
            return 1.0 / (config.rope_parameters["rope_theta"] ** exponent), 1.0
        return ROPE_INIT_FUNCTIONS[rope_type](config, torch.device("cpu"))


def rotation(positions: Tensor, inverse_frequencies: Tensor, factor: float) -> tuple[Tensor, Tensor]:
    """cos and sin, each (T, 1, head_dim), for positions (T,)."""
    angles = positions[:, None].to(inverse_frequencies.dtype) * inverse_frequencies
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos() * factor, angles.sin() * factor


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys (T, heads, head_dim); halves are paired, as in Llama and gpt-oss."""
    first, second = states.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (states * cos + turned * sin).to(states.dtype)
