"""drafthead's own step: the modules that training uses, without DeepSpeed around them."""

import torch

from drafthead.drafters.base import DraftShape, valid_positions
from drafthead.drafters.batch import PackedBatch, tail_layout
from drafthead.drafters.eagle3.config import Eagle3Head
from drafthead.drafters.eagle3.model import DraftModel
from drafthead.target.pieces import FrozenTarget
from drafthead.training.trainer import LossModule
from stepbench.contestant import STEP_DECAY, Assignment, TrainStep, adamw, serve
from stepbench.inputs import EPS, ROPE_THETA
from stepbench.shapes import Shape


def draft_model(shape: Shape) -> DraftModel:
    """A head of this shape, in the arithmetic that both peers share: no norm before fc, residual un-normed."""
    head = Eagle3Head(
        type="eagle3", draft_vocab_size=shape.draft_vocab, intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads, head_dim=shape.head_dim, norm_before_fc=False,
    )  # fmt: skip
    rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
    return DraftModel(DraftShape(head, shape.hidden, shape.vocab, shape.layers, EPS, rope, 2 * shape.tokens))


def build(assignment: Assignment) -> TrainStep:
    """Weights, batch and optimiser."""
    shape, tensors = assignment.shape, assignment.tensors
    model = draft_model(shape)
    weights = {name.removeprefix("draft."): value for name, value in tensors.items() if name.startswith("draft.")}
    missing = model.load_state_dict(weights, strict=False)
    assert not missing.unexpected_keys
    model.to(assignment.device, getattr(torch, shape.dtype))
    module = LossModule(model)
    optimizer = adamw(list(module.parameters()))
    batch, target = packed_batch(assignment), frozen_target(assignment)
    # Counting positions belongs to the plan of an epoch, not to its steps.
    counts = batch.scored.sum(1)  # (K,)
    scale = (STEP_DECAY ** torch.arange(shape.ttt_steps, device=counts.device) / counts).to(torch.float32)

    def step() -> list[float]:
        scored = module(batch, target, scale)
        scored.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return (scored.position_sums / counts).tolist()

    return step


def packed_batch(assignment: Assignment) -> PackedBatch:
    """The B documents end to end, every row with a loss."""
    shape, tensors = assignment.shape, assignment.tensors
    flat = {name: tensors[name].flatten(0, 1) for name in ("input_ids", "aux", "last_hidden", "lse", "argmax")}
    device, B = torch.device(assignment.device), shape.batch
    ones = torch.ones(shape.tokens_per_step, dtype=torch.bool, device=device)
    return PackedBatch(
        ids=tuple(map(str, range(B))),
        layout=tail_layout([shape.tokens] * B, [0] * B).to(device),
        positions=torch.arange(shape.tokens, device=device).repeat(B),
        loss_mask=ones,
        scored=valid_positions(ones[: shape.tokens], shape.ttt_steps).repeat(1, B),
        of_row=torch.arange(shape.tokens_per_step, device=device),
        **flat,
    )


def frozen_target(assignment: Assignment) -> FrozenTarget:
    """The target's tensors, its head cut down to the draft vocabulary."""
    tensors = assignment.tensors
    rows = tensors["lm_head"][tensors["target_ids"]]
    return FrozenTarget(tensors["embeddings"], tensors["final_norm"], rows, EPS, tensors["target_ids"])


if __name__ == "__main__":
    serve(build, "drafthead")
