"""drafthead's own step: the modules that training uses, without DeepSpeed around them or as its trainer runs them at a
`train.precision`; and its own trainer."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from drafthead.config import load_recipe
from drafthead.config.train import TrainConfig
from drafthead.drafters.base import Drafter, DraftModule, DraftShape
from drafthead.drafters.batch import PackedBatch, tail_layout
from drafthead.drafters.eagle3.config import EagleHead
from drafthead.drafters.registry import drafter_of, parse_head
from drafthead.target.pieces import FrozenTarget
from drafthead.training.inputs import open_inputs
from drafthead.training.trainer import LossModule, Trainer
from stepbench.contestant import LEARNING_RATE, STEP_DECAY, Assignment, Done, TrainStep, adamw, serve
from stepbench.inputs import MASK, ROPE_THETA, target_config
from stepbench.shapes import Shape
from stepbench.training import Plan

SAME = (
    "head.norm_before_residual=false", "head.norm_before_fc=false", "head.fc_norm=false", "head.norm_output=false",
    f"head.step_weight_decay={STEP_DECAY}", "head.feature_weight=0", "train.optimizer=adamw",
    "train.objective=forward_kl", "train.temperature=1.0", "train.rejection=false",
)  # fmt: skip


def drafter_at(kind: str, shape: Shape) -> Drafter:
    """A drafter of this shape, with one layer; EAGLE-3 in the arithmetic that both peers share."""
    settings: dict = {"num_draft_positions": shape.ttt_steps, "mask_token_id": MASK}
    if kind == "eagle3":
        settings = {"num_ttt_steps": shape.ttt_steps, "norm_before_fc": False}
    sizes = {
        "draft_vocab_size": shape.draft_vocab, "intermediate_size": shape.intermediate, "head_dim": shape.head_dim,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads,
    }  # fmt: skip
    return drafter_of(parse_head({"type": kind, **sizes, **settings}))


def draft_model(drafter: Drafter, shape: Shape) -> DraftModule:
    """Its module with random weights."""
    rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
    return drafter.MODULE(
        DraftShape(drafter.head, shape.hidden, shape.vocab, shape.layers, shape.eps, rope, 2 * shape.tokens)
    )


def build(assignment: Assignment) -> TrainStep:
    """Weights, batch and optimiser."""
    shape, tensors = assignment.shape, assignment.tensors
    drafter = drafter_at(assignment.drafter, shape)
    model = draft_model(drafter, shape)
    compared = assignment.drafter == "eagle3"
    if compared:
        weights = {name.removeprefix("draft."): value for name, value in tensors.items() if name.startswith("draft.")}
        assert not model.load_state_dict(weights, strict=False).unexpected_keys
    module, plain = LossModule(model), assignment.variant == "packed"
    model.to(assignment.device, getattr(torch, shape.dtype) if plain else torch.float32)
    batch, target = packed_batch(assignment, drafter), frozen_target(assignment)
    if plain:
        optimizer = adamw(list(module.parameters()))
        forward, update = module, lambda loss: (loss.backward(), optimizer.step(), optimizer.zero_grad())
    else:
        forward, update = as_trained(module, assignment)
        dtype = torch.bfloat16 if assignment.variant == "bf16" else torch.float32
        rows, embeddings = target.head_rows.to(dtype), target.embeddings.to(dtype)
        batch, target = batch.cast(dtype), replace(target, head_rows=rows, embeddings=embeddings)
    # Counting positions belongs to the plan of an epoch, not to its steps.
    counts = batch.scored.sum(1)  # (K,)
    scale = (drafter.position_weights().to(counts.device) / counts).to(torch.float32)
    num_rows = None if compared else int(counts.sum())

    def step() -> Done:
        scored = forward(batch, target, scale)
        update(scored.loss)
        return Done((scored.position_sums / counts).tolist(), num_rows)

    return step


def as_trained(module: LossModule, assignment: Assignment) -> tuple[Callable, Callable]:
    """The module within DeepSpeed, and what follows its forward: backward, and the update by Muon."""
    from drafthead.training.accelerator import build_accelerator  # imports DeepSpeed
    from drafthead.training.optimizer import build_optimizer

    config = TrainConfig(
        precision=assignment.variant, optimizer="muon", learning_rate=LEARNING_RATE,
        tokens_per_batch=assignment.shape.tokens_per_step, checkpoint_every=1,
    )  # fmt: skip
    threads = torch.get_num_threads()
    accelerator = build_accelerator(config, module, str(assignment.target.parent))
    torch.set_num_threads(threads)
    engine, optimizer = accelerator.prepare(module, build_optimizer(config, module.draft))

    def update(loss: Tensor) -> None:
        with accelerator.accumulate(engine):
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()

    return engine, update


def packed_batch(assignment: Assignment, drafter: Drafter) -> PackedBatch:
    """The B documents end to end, every row with a loss where the drafter trains it."""
    shape, tensors = assignment.shape, assignment.tensors
    flat = {name: tensors[name].flatten(0, 1) for name in ("input_ids", "aux", "last_hidden", "lse", "argmax")}
    device, B = torch.device(assignment.device), shape.batch
    ones = torch.ones(shape.tokens_per_step, dtype=torch.bool, device=device)
    batch = PackedBatch(
        layout=tail_layout([shape.tokens] * B, [0] * B),
        positions=torch.arange(shape.tokens, device=device).repeat(B),
        loss_mask=ones,
        scored=drafter.trained_rows(torch.ones(shape.tokens, dtype=torch.bool)).repeat(1, B).to(device),
        of_row=torch.arange(shape.tokens_per_step, device=device),
        **flat,
    )
    return batch.prepared(drafter.num_positions, device.type, drafter.computed_rows(batch.scored)).on(device)


def frozen_target(assignment: Assignment) -> FrozenTarget:
    """The target's tensors, its head cut down to the draft vocabulary."""
    tensors, eps = assignment.tensors, assignment.shape.eps
    rows = tensors["lm_head"][tensors["target_ids"]]
    return FrozenTarget(tensors["embeddings"], tensors["final_norm"], rows, eps, tensors["target_ids"])


class OurTrainee:
    """The trainer that the recipe gets, DeepSpeed and reading ahead included.

    Variants: `same` (the arithmetic and the optimiser that both peers share) and `shipped` (the recipe as it is).
    """

    def __init__(self, assignment: Assignment, plan: Plan):
        overrides, same = plan.overrides, assignment.variant == "same"
        recipe = load_recipe(plan.recipe, [*overrides, *SAME] if same else overrides)
        inputs = open_inputs(recipe)
        if same:
            rope = target_config(assignment.shape)["rope_parameters"]
            inputs = replace(inputs, spec=inputs.spec.model_copy(update={"rope_parameters": rope}))
        self.trainer = Trainer(recipe, inputs)
        self.trainer.total_steps = len(plan.steps)  # of the schedule
        documents = [[w.document for batch in self.trainer.group(s) for w in batch] for s in range(len(plan.steps))]
        assert documents == plan.steps
        shape = self.trainer.shape
        assert isinstance(shape.head, EagleHead)
        self.head = {name: getattr(shape.head, name) for name in EagleHead.model_fields if "norm" in name}
        self.rope = shape.rope_parameters

    def prepare(self, step: int) -> int:
        return step

    def step(self, batch: int) -> None:
        self.trainer.step(batch)

    def weights(self) -> dict[str, Tensor]:
        weights = self.trainer.weights()
        return {name: value for name, value in weights.items() if name not in ("d2t", "t2d")}

    def drafts(self) -> None:
        return None


if __name__ == "__main__":
    serve(build, "drafthead", OurTrainee)
