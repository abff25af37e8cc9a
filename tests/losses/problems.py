"""Random inputs of the fused head, as test-time training makes them."""

import torch

from drafthead.losses.fused import HeadRows, Teacher


def ttt_rows(states, valid):
    """Step k at index t meets teacher token t + 1 + k, where `valid` (K, T); states (K, T, H)."""
    steps, index = (torch.arange(size, device=valid.device) for size in valid.shape)
    teacher = torch.where(valid, index + 1 + steps[:, None], -1)
    return HeadRows(states.flatten(0, 1), teacher.flatten(), (valid.shape[1],) * len(valid))


def random_problem(num_steps, num_tokens, seed=0, hidden=6, vocab=9):
    """States (K, T, H), head (D, H), teacher, valid (K, T) and scale (K,), in float64."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(num_steps, num_tokens, hidden, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(vocab, hidden, generator=generator, dtype=torch.float64, requires_grad=True)
    teacher = Teacher(
        torch.randn(num_tokens, hidden, generator=generator, dtype=torch.float64),
        torch.randn(vocab, hidden, generator=generator, dtype=torch.float64),
        torch.full((num_tokens,), 20.0, dtype=torch.float64),
    )
    valid = torch.rand(num_steps, num_tokens, generator=generator) < 0.6
    for k in range(num_steps):
        valid[k, max(num_tokens - 1 - k, 0) :] = False  # the teacher row t + 1 + k must exist
    scale = torch.rand(num_steps, generator=generator, dtype=torch.float64)
    return states, weight, teacher, valid, scale
