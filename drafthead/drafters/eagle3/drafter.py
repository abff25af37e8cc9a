"""EAGLE-3 behind the interface of `drafters.base`. TTT step k at index t reads the embedding of x[t+1+k]."""

import torch
from torch import Tensor

from drafthead.drafters.base import Drafter, DraftModule, DraftShape
from drafthead.drafters.eagle3.config import Eagle3Head
from drafthead.drafters.eagle3.model import DraftModel
from drafthead.drafters.eagle3.vllm import Eagle3Files


class Eagle3(Drafter):
    """EAGLE-3, and 3.1 by its norms."""

    head: Eagle3Head
    vllm = Eagle3Files()

    def position_weights(self) -> Tensor:
        """decay**k."""
        return torch.tensor([self.head.step_weight_decay**k for k in range(self.num_positions)], dtype=torch.float64)

    def build(self, shape: DraftShape) -> DraftModule:
        """The module with random weights."""
        return DraftModel(shape)
