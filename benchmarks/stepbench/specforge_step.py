"""SpecForge's own step: its EAGLE-3 strategy, model and target head.

On a CPU its Triton loss cannot run, so the PyTorch reference that stands beside it in `core/loss.py` takes
its place. Attention is its "sdpa" backend: flex attention has no backward there, and the flash backends
need a GPU. The target's final norm is applied beforehand and not timed, since SpecForge stores normed
states. Its `BF16Optimizer` would keep a second copy of fp32 weights: plain AdamW is kinder to it.
"""

from dataclasses import replace

import torch
from specforge.algorithms.eagle3 import model as eagle3
from specforge.config.schema import TrainingConfig
from specforge.core import loss as specforge_loss
from specforge.data.utils import DataCollatorWithPadding
from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
from specforge.modeling.target.target_head import TargetHead
from specforge.optimizer import BF16Optimizer
from specforge.runtime.contracts import TrainBatch
from specforge.training.strategies.base import Eagle3TrainStrategy
from torch import Tensor
from transformers import LlamaConfig

from stepbench.contestant import STEP_DECAY, Assignment, Done, TrainStep, adamw, serve
from stepbench.inputs import normed, target_config
from stepbench.training import EMBEDDING, Documents, Plan

PADDED = 4  # documents padded to one another: 12 % more positions on the embedded data; a step's in one: 105 %


class ReferenceLoss:
    """Stands where the Triton autograd function stood; calls SpecForge's reference."""

    @staticmethod
    def apply(logits: Tensor, target_p: Tensor, position_mask: Tensor) -> Tensor:
        return specforge_loss._compute_loss(logits, target_p, position_mask)


def build(assignment: Assignment) -> TrainStep:
    """Variants: `full` (its default, the target's whole vocabulary at once) and `compact` (its own option)."""
    strategy, draft = strategy_of(assignment, compact=assignment.variant == "compact")
    batch = train_batch(assignment)
    optimizer = adamw([p for p in draft.parameters() if p.requires_grad])

    def step() -> Done:
        output = strategy.forward_loss(batch)
        output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return Done([float(loss) for loss in output.metrics["plosses"]])

    return step


def strategy_of(assignment: Assignment, compact: bool = False) -> tuple[Eagle3TrainStrategy, LlamaForCausalLMEagle3]:
    """Its strategy around the draft model with everyone's weights."""
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
    return Eagle3TrainStrategy(module, target_head=head, ploss_decay=STEP_DECAY, compact_teacher=compact), draft


def train_batch(assignment: Assignment) -> TrainBatch:
    """The batch as SpecForge's offline collator delivers it."""
    tensors = assignment.tensors
    features = {
        "input_ids": tensors["input_ids"],
        "attention_mask": tensors["loss_mask"],
        "loss_mask": tensors["loss_mask"],
        "hidden_state": tensors["aux"],
        "target": normed(tensors["last_hidden"], assignment.shape.eps),
    }
    return TrainBatch(["0"], "eagle3", features, {"target_repr": "hidden_state"})


class SpecForgeTrainee:
    """Its strategy and its optimiser with clipping and schedule, on batches of its own padding collator.

    Variants: `same` (unrolled as the recipe is, AdamW at the recipe's rate) and `shipped` (its defaults for both).
    """

    def __init__(self, assignment: Assignment, plan: Plan):
        shape, shipped, defaults = assignment.shape, assignment.variant == "shipped", TrainingConfig()
        if shipped:
            assignment = replace(assignment, shape=replace(shape, ttt_steps=defaults.ttt_length))
        self.head: dict[str, bool] = {}
        self.rope = target_config(shape)["rope_parameters"]
        self._plan, self._norm = plan, assignment.tensors["final_norm"]
        self._documents, self._validation = Documents(plan.train), Documents(plan.validation)
        self._strategy, self._draft = strategy_of(assignment)
        self._optimizer = BF16Optimizer(
            self._draft, lr=defaults.learning_rate if shipped else plan.learning_rate, total_steps=len(plan.steps),
            max_grad_norm=defaults.max_grad_norm, warmup_ratio=defaults.warmup_ratio,
            lr_scheduler=defaults.lr_scheduler,
        )  # fmt: skip
        for step in range(min(2, len(plan.steps))):  # what torch.compile makes is not timed; no weight changes
            self._backward(self.prepare(step))
        self._draft.zero_grad()

    def prepare(self, step: int) -> list[tuple[TrainBatch, float]]:
        """Documents of like length padded to one another, and the share of the step's positions that each batch has."""
        documents = sorted((self._documents[i] for i in self._plan.steps[step]), key=lambda d: len(d["input_ids"]))
        batches = [self._batch(documents[i : i + PADDED]) for i in range(0, len(documents), PADDED)]
        sizes = [batch.tensors["input_ids"].numel() for batch in batches]
        return [(batch, size / sum(sizes)) for batch, size in zip(batches, sizes, strict=True)]

    def step(self, batch: list[tuple[TrainBatch, float]]) -> None:
        self._backward(batch)
        self._optimizer.step()

    def weights(self) -> dict[str, Tensor]:
        left_out = (EMBEDDING, "d2t", "t2d")
        return {name: v for name, v in self._draft.state_dict().items() if not name.startswith(left_out)}

    def drafts(self) -> Tensor:
        drafts_by_step: list[Tensor] = []
        compute = self._draft.compute_logits

        def compute_and_note(states: Tensor) -> Tensor:
            logits = compute(states)
            drafts_by_step.append(logits[0].argmax(-1))
            return logits

        self._draft.compute_logits = compute_and_note
        self._strategy.forward_loss(self._batch([self._validation[self._plan.checked]]))
        self._draft.compute_logits = compute
        return torch.stack(drafts_by_step)

    def _backward(self, batch: list[tuple[TrainBatch, float]]) -> None:
        for part, share in batch:
            (self._strategy.forward_loss(part).loss * share).backward()

    def _batch(self, documents: list[dict[str, Tensor]]) -> TrainBatch:
        features = [
            {
                "input_ids": d["input_ids"][None],
                "attention_mask": torch.ones_like(d["loss_mask"])[None],
                # Its reader of stored states leaves the last token out.
                "loss_mask": torch.cat([d["loss_mask"][:-1], d["loss_mask"].new_zeros(1)])[None],
                "hidden_state": d["aux"][None],
                "target": normed(d["last_hidden"], self._plan.shape.eps, self._norm)[None],
            }
            for d in documents
        ]
        return TrainBatch(["0"], "eagle3", DataCollatorWithPadding()(features), {"target_repr": "hidden_state"})


if __name__ == "__main__":
    serve(build, "specforge", SpecForgeTrainee)
