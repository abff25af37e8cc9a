"""A frozen target beside the small draft model: eight dimensions, twenty tokens, float64."""

import torch

from drafthead.drafters.eagle3.drafter import DraftModel
from drafthead.target.pieces import FrozenTarget

NUM_STEPS = 3


def frozen(model: DraftModel) -> FrozenTarget:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(model.shape.vocab_size, 8, generator=generator, dtype=torch.float64)
    ids = torch.arange(0, 2 * model.shape.head.draft_vocab_size, 2)[: model.shape.head.draft_vocab_size].clamp_max(19)
    return FrozenTarget(rows, torch.ones(8, dtype=torch.float64), rows[ids], 1e-5, ids)
