"""A repair of vLLM 0.32's CPU build, without which speculative sampling above temperature 0 is wrong.

Its `expand` kernel converts what it writes to int64 and throws the converted copy away, so the temperature of
every draft position is whatever lay in memory: text at T > 0 is garbled and acceptance meaningless (T = 0 does not
take that path). The replacement does the same in PyTorch. It must be in place before an engine starts.
"""

import importlib
from typing import Any

import torch


def repair_cpu_build() -> None:
    """Put the replacement where the CPU platform looks for the kernel; does nothing a second time."""
    kernels: Any = importlib.import_module("vllm.utils.cpu_triton_utils")
    kernels._expand_kernel_impl = expand


def expand(
    output: torch.Tensor,
    input_val: torch.Tensor,
    cu_num_tokens: torch.Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: int | None = None,
) -> None:
    """Repeat each request's value for each of its tokens: [a, b] with ends [2, 5] gives [a, a, b, b, b].

    Args:
        output: (tokens,) written.
        input_val: (requests,) values.
        cu_num_tokens: (requests,) where the tokens of each request end.
        replace_from, replace_to: a value that is replaced on the way.
        MAX_NUM_TOKENS: not needed here; part of the kernel's signature.
    """
    values = torch.where(input_val == replace_from, replace_to, input_val).to(output.dtype)
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    output.copy_(torch.repeat_interleave(values, counts))
