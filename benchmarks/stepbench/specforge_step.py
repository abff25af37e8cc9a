"""SpecForge's own step: its EAGLE-3 strategy, model and target head.

On a CPU its Triton loss cannot run, so the PyTorch reference that stands beside it in `core/loss.py` takes
its place. Attention is its "sdpa" backend: flex attention has no backward there, and the flash backends
need a GPU. The target's final norm is applied beforehand and not timed, since SpecForge stores normed
states. Its `BF16Optimizer` would keep a second copy of fp32 weights: plain AdamW is kinder to it.
"""

import torch
from specforge.algorithms.eagle3 import model as eagle3
from specforge.core import loss as specforge_loss
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.base import Eagle3TrainStrategy
from torch import Tensor
from transformers import LlamaConfig

from stepbench.contestant import STEP_DECAY, Assignment, Done, TrainStep, adamw, serve
from stepbench.inputs import normed, target_config


class ReferenceLoss:
    """Stands where the Triton autograd function stood; calls SpecForge's reference."""

    @staticmethod
    def apply(logits: Tensor, target_p: Tensor, position_mask: Tensor) -> Tensor:
        return specforge_loss._compute_loss(logits, target_p, position_mask)


def build(assignment: Assignment) -> TrainStep:
    """Variants: `full` (its default, the target's whole vocabulary at once) and `compact` (its own option)."""
    shape, tensors = assignment.shape, assignment.tensors
    dtype = getattr(torch, shape.dtype)
    if assignment.device == "cpu":
        eagle3.LogSoftmaxLoss = ReferenceLoss
    backend = "sdpa" if assignment.device == "cpu" else "flex_attention"
    draft = LlamaForCausalLMEagle3(
        LlamaConfig(**target_config(shape), draft_vocab_size=shape.draft_vocab, pretraining_tp=1),
        attention_backend=backend,
    )
    weights = {name.removeprefix("draft."): value for name, value in tensors.items() if name.startswith("draft.")}
    assert not draft.load_state_dict(weights, strict=False).unexpected_keys
    draft.load_embedding(str(assignment.target))
    draft.freeze_embedding()
    ids = tensors["target_ids"]
    draft.t2d.zero_()[ids.cpu()] = True
    draft.d2t.copy_(ids.cpu() - torch.arange(len(ids)))
    draft.to(assignment.device, dtype)
    head = TargetHead(str(assignment.target))
    head.load_weights(str(assignment.target))
    head.freeze_weights()
    head.to(assignment.device, dtype)

    module = eagle3.OnlineEagle3Model(draft, length=shape.ttt_steps, attention_backend=backend)
    strategy = Eagle3TrainStrategy(
        module, target_head=head, ploss_decay=STEP_DECAY, compact_teacher=assignment.variant == "compact"
    )
    batch = train_batch(assignment)
    optimizer = adamw([p for p in module.parameters() if p.requires_grad])

    def step() -> Done:
        output = strategy.forward_loss(batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return Done([float(loss) for loss in output.metrics["plosses"]])

    return step


def train_batch(assignment: Assignment) -> TrainBatch:
    """The batch as SpecForge's offline collator delivers it."""
    tensors = assignment.tensors
    features = {
        "input_ids": tensors["input_ids"],
        "attention_mask": tensors["loss_mask"],
        "loss_mask": tensors["loss_mask"],
        "hidden_state": tensors["aux"],
        "target": normed(tensors["last_hidden"]),
    }
    return TrainBatch(["0"], "eagle3", features, {"target_repr": "hidden_state"})


if __name__ == "__main__":
    serve(build, "specforge")
