"""The rate of the machine's matrix products at the shape of the draft head.

Forward (R, H) @ (H, D), and the backward's (R, D) @ (D, H) and (D, R) @ (R, H), for all R = B x T rows at
once and into memory that is already there. The peak is the fastest of the three in any round, so that a
share of it is never flattered by a noisy moment.
"""

from functools import partial

import torch

from stepbench.clock import seconds_of
from stepbench.shapes import Shape

_REPEATS = 3


class HeadProducts:
    """The three products of the head, ready to be timed."""

    def __init__(self, shape: Shape, device: str):
        dtype, rows = getattr(torch, shape.dtype), shape.tokens_per_step
        self.device = device
        states = torch.randn(rows, shape.hidden, dtype=dtype, device=device)
        weight = torch.randn(shape.draft_vocab, shape.hidden, dtype=dtype, device=device)
        logits = torch.randn(rows, shape.draft_vocab, dtype=dtype, device=device)
        self._products = {
            "forward": (states, weight.T, torch.empty_like(logits)),
            "backward to states": (logits, weight, torch.empty_like(states)),
            "backward to weight": (logits.T, states, torch.empty_like(weight)),
        }
        self._flops = 2 * rows * shape.hidden * shape.draft_vocab
        self.rates: dict[str, list[float]] = {name: [] for name in self._products}

    def play(self) -> None:
        """Time each product; the best of a few repeats counts as this round's rate (FLOP/s)."""
        for name, (left, right, out) in self._products.items():
            times = [seconds_of(partial(torch.mm, left, right, out=out), self.device) for _ in range(1 + _REPEATS)]
            self.rates[name].append(self._flops / min(times[1:]))  # the first warms up

    @property
    def best(self) -> float:
        """FLOP/s of the fastest product in any round."""
        return max(max(rates) for rates in self.rates.values())
