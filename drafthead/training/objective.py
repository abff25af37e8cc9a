"""From a packed batch to a loss: the module that DeepSpeed wraps, and the frozen tensors it reads.

Shapes: T tokens, R loss rows, K TTT steps, H hidden, D draft vocabulary, V target vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from drafthead.data.packing import PackedBatch
from drafthead.drafters.eagle3.model import DraftModel
from drafthead.drafters.host_memory import give_back
from drafthead.losses.fused import HeadLoss, HeadRows, Teacher, head_loss
from drafthead.losses.objectives import Objective


@dataclass(frozen=True)
class FrozenTarget:
    """What training needs of the target, in the compute type and on the device.

    Attributes:
        embeddings: (V, H).
        final_norm: (H,).
        head_rows: (D, H) rows of lm_head for the draft vocabulary.
        rms_norm_eps: of the final norm.
        target_ids: (D,) target id of every draft id.
    """

    embeddings: Tensor
    final_norm: Tensor
    head_rows: Tensor
    rms_norm_eps: float
    target_ids: Tensor

    def teacher(self, last_hidden: Tensor, lse: Tensor) -> Teacher:
        """The target's side of the loss from the input of its final norm (R, H) and its log-sum-exp (R,)."""
        wide = last_hidden.to(torch.promote_types(last_hidden.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.rms_norm_eps)
        return Teacher((wide * self.final_norm).to(self.head_rows.dtype), self.head_rows, lse)


class TTTObjective(nn.Module):
    """Unroll the draft model and score all steps in one fused pass."""

    def __init__(
        self,
        draft: DraftModel,
        num_steps: int,
        objective: Objective = "forward_kl",
        zero_hidden_states: bool = False,
        recompute: bool = False,
    ):
        super().__init__()
        self.draft = draft
        self.num_steps = num_steps
        self.objective = objective
        self.zero_hidden_states = zero_hidden_states
        self.recompute = recompute

    def forward(
        self, batch: PackedBatch, target: FrozenTarget, valid: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss over the valid positions; `score` is the readable way to call this.

        Args:
            batch: T tokens.
            target: frozen tensors.
            valid: (K, R) bool rows that count.
            scale: (K,) weight of one position at each step, normalisation included.

        Returns:
            The fields of `HeadLoss` as a plain tuple, predictions as (K, R): ZeRO-3 gathers weights for the backward
            through hooks on output tensors, and looks for them in tuples only.
        """
        aux = torch.zeros_like(batch.aux) if self.zero_hidden_states else batch.aux
        embeddings = nn.functional.embedding(batch.input_ids, target.embeddings)
        recompute = self.recompute and torch.is_grad_enabled()
        states = self.draft.unroll(aux, embeddings, batch.positions, batch.layout, self.num_steps, recompute)
        give_back(states[0])  # what the steps freed, before the loss needs buffers
        teacher = target.teacher(batch.last_hidden, batch.lse)
        rows = HeadRows(states.flatten(0, 1), teacher_tokens(valid), (valid.shape[1],) * len(valid))
        scored = head_loss(rows, self.draft.lm_head.weight, teacher, scale, self.objective)
        give_back(states[0])
        return scored.loss, scored.position_sums, scored.predictions.view(valid.shape)


def teacher_tokens(valid: Tensor) -> Tensor:
    """(K * R,) row of the teacher that step k meets at row t, which is t + 1 + k; -1 where `valid` (K, R) is false."""
    steps, rows = (torch.arange(size, device=valid.device) for size in valid.shape)
    return torch.where(valid, rows + 1 + steps[:, None], -1).flatten()


def score(objective: nn.Module, batch: PackedBatch, target: FrozenTarget, valid: Tensor, scale: Tensor) -> HeadLoss:
    """Call a `TTTObjective`, or the engine that wraps one; arguments as in its forward."""
    return HeadLoss(*objective(batch, target, valid, scale))


def step_weights(num_steps: int, decay: float) -> Tensor:
    """(K,) weight of each TTT step: decay**k."""
    return torch.tensor([decay**k for k in range(num_steps)], dtype=torch.float64)
