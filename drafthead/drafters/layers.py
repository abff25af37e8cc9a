"""Parts of a dense Llama block, which all draft models are made of: norm, projection, SwiGLU, rotary embedding.

The rotary embedding takes any scaling the target uses (plain, YaRN, Llama 3, ...): frequencies and the attention factor
come from transformers' own table of scaling rules, so a head rotates exactly as its target does. Rotation is computed
in float32 (float64 for float64 inputs).
"""

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from drafthead.drafters.base import DraftShape
from drafthead.drafters.recompute import gated, kernels_for, rms_norm


class RMSNorm(nn.Module):
    """Root-mean-square norm with float32 statistics (float64 for float64 inputs)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, states: Tensor) -> Tensor:
        return rms_norm(states, self.weight, self.eps)


class Projection(nn.Linear):
    """A product without bias, of all input features or a run of them, on top of what other features gave."""

    def __init__(self, size: int, out: int):
        super().__init__(size, out, bias=False)

    def forward(self, states: Tensor, features: slice = slice(None), base: Tensor | None = None) -> Tensor:
        """states (R, n) with the n columns `features` of the weight, added to base (R, out)."""
        weight = self.weight[:, features].T
        return states @ weight if base is None else torch.addmm(base, states, weight)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, intermediate_size: int):
        super().__init__()
        self.gate_proj = Projection(hidden_size, intermediate_size)
        self.up_proj = Projection(hidden_size, intermediate_size)
        self.down_proj = Projection(intermediate_size, hidden_size)

    def forward(self, states: Tensor) -> Tensor:
        return self.down_proj(gated(self.gate_proj(states), self.up_proj(states)))


class Rotary:
    """The rotations of a head: cos and sin at positions.

    Attributes:
        frequencies: (head_dim / 2,) inverse, float32 whatever the compute type: positions in the thousands need it.
        factor: factor of cos and sin.
    """

    def __init__(self, shape: DraftShape):
        rope, dim, self.factor = shape.rope_parameters, shape.head.head_dim, 1.0
        with torch.device("cpu"):  # real numbers even while a model is built on meta tensors
            if rope["rope_type"] == "default":
                frequencies = 1.0 / (rope["rope_theta"] ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim))
            else:
                config = LlamaConfig(
                    hidden_size=shape.hidden_size, num_attention_heads=shape.head.num_attention_heads, head_dim=dim,
                    rope_parameters=dict(rope), max_position_embeddings=shape.max_position_embeddings,
                )  # fmt: skip
                frequencies, self.factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
        self.frequencies = frequencies.to(torch.float32)

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin, each (T, 1, head_dim), for positions (T,), in float32 or wider."""
        # Kept where it is used: copied in every step, it would have the host wait for the device each time.
        self.frequencies = self.frequencies.to(positions.device)
        frequencies = self.frequencies.to(torch.promote_types(dtype, torch.float32))
        angles = positions[:, None].to(frequencies.dtype) * frequencies
        angles = torch.cat([angles, angles], dim=-1)[:, None]
        return angles.cos() * self.factor, angles.sin() * self.factor


def by_head(states: Tensor, rope: Tensor) -> Tensor:
    """States (R, heads * head_dim) as (R, heads, head_dim), for as many positions as `rope` (R, 1, head_dim) has; a
    single state (1, heads * head_dim) is that of all of them."""
    return states.unflatten(-1, (-1, rope.shape[-1])).expand(len(rope), -1, -1)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys (T, heads, head_dim); halves are paired, as in Llama and gpt-oss."""
    return _Rotated.apply(states, cos, sin)


class _Rotated(torch.autograd.Function):
    """A rotation's gradient is rotated back."""

    @staticmethod
    def forward(ctx, states, cos, sin):
        ctx.save_for_backward(cos, sin)
        return _rotated(states, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        return _rotated(grad, cos, sin, back=True), None, None


def _rotated(states: Tensor, cos: Tensor, sin: Tensor, back: bool) -> Tensor:
    if kernels := kernels_for(states):
        return kernels.rotate(states, cos, sin, back)
    wide, sign = states.to(cos.dtype), -1 if back else 1
    out = wide * cos
    (first, second), (out_first, out_second) = wide.chunk(2, -1), out.chunk(2, -1)
    sin_first, sin_second = sin.chunk(2, -1)
    out_first.addcmul_(second, sin_first, value=-sign)
    out_second.addcmul_(first, sin_second, value=sign)
    return out.to(states.dtype)
