"""Random inputs of the fused head, as test-time training makes them."""

import torch

from drafthead.losses.fused import HeadRows, Teacher


def random_problem(
    num_steps, num_tokens, hidden=6, vocab=9, seed=0, dtype=torch.float64, device="cpu"
) -> tuple[HeadRows, torch.Tensor, Teacher, torch.Tensor]:
    """Rows, head (D, H), teacher and scale (K,). Step k at index t meets teacher token t + 1 + k, if it is scored."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64, device=device).to(dtype)

    states, weight, teacher_hidden, teacher_weight = (
        random(rows, hidden) / hidden**0.25 for rows in (num_steps * num_tokens, vocab, num_tokens, vocab)
    )
    wide = torch.promote_types(dtype, torch.float32)
    lse = (teacher_hidden @ teacher_weight.T).to(wide).logsumexp(-1) + 0.3  # a part lies outside the vocabulary
    steps, index = (torch.arange(size, device=device) for size in (num_steps, num_tokens))
    met = index + 1 + steps[:, None]
    scored = (torch.rand(met.shape, generator=generator, device=device) < 0.6) & (met < num_tokens)
    rows = HeadRows(states.requires_grad_(), torch.where(scored, met, -1).flatten(), (num_tokens,) * num_steps)
    scale = torch.rand(num_steps, generator=generator, dtype=wide, device=device)
    return rows, weight.requires_grad_(), Teacher(teacher_hidden, teacher_weight, lse), scale
