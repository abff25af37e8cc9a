"""Attention with every score written out, forward and backward: for CUDA in float32 and float64.

CUDA's flash kernels take half precision only. Memory is quadratic in the length of a document, so this is
for small runs and for tests at full precision; train large heads with train.precision bf16. Same arguments
and results as torch's flash attention for the CPU, whose place it takes.

Shapes: Q heads, R queries, T keys, D head dimension; R = T where causal.
"""

import torch
from torch import Tensor


def forward(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Output (1, Q, R, D) and log-sum-exp (1, Q, R) of query (1, Q, R, D), key and value (1, Q, T, D)."""
    scores = _scores(query, key, causal, scale)
    lse = scores.logsumexp(-1)
    return (scores - lse[..., None]).exp() @ value, lse


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    lse: Tensor,
    dropout: float,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of query, key and value; `out` and `lse` may be those of a softmax that has further keys."""
    probability = (_scores(query, key, causal, scale) - lse[..., None]).exp()
    row = (grad * out).sum(-1, keepdim=True)
    grad_scores = probability * (grad @ value.mT - row) * scale
    return grad_scores @ key, grad_scores.mT @ query, probability.mT @ grad


def _scores(query: Tensor, key: Tensor, causal: bool, scale: float) -> Tensor:
    scores = query @ key.mT * scale  # (1, Q, R, T)
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores.masked_fill_(future, float("-inf"))
    return scores
