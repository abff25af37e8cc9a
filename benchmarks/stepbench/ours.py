"""drafthead's own step: the modules that training uses, without DeepSpeed around them."""

import torch

from drafthead.config import HeadConfig
from drafthead.data.packing import PackedBatch
from drafthead.drafters.eagle3.alignment import valid_positions
from drafthead.drafters.eagle3.model import DraftModel, DraftShape
from drafthead.drafters.layout import tail_layout
from drafthead.training.objective import FrozenTarget, TTTObjective, score, step_weights
from stepbench.contestant import STEP_DECAY, Assignment, TrainStep, adamw, serve
from stepbench.inputs import EPS, ROPE_THETA
from stepbench.shapes import Shape


def draft_model(shape: Shape) -> DraftModel:
    """A head of this shape, in the arithmetic that both peers share: no norm before fc, residual un-normed."""
    head = HeadConfig(
        draft_vocab_size=shape.draft_vocab, intermediate_size=shape.intermediate, num_attention_heads=shape.heads,
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
    module = TTTObjective(model, shape.ttt_steps)
    optimizer = adamw(list(module.parameters()))
    batch, target = packed_batch(assignment), frozen_target(assignment)
    # Counting positions belongs to the plan of an epoch, not to its steps.
    counts = valid_positions(batch.loss_mask, batch.layout.cu_rows, shape.ttt_steps).sum(1)  # (K,)
    scale = (step_weights(shape.ttt_steps, STEP_DECAY).to(counts.device) / counts).to(torch.float32)

    def step() -> list[float]:
        valid = valid_positions(batch.loss_mask, batch.layout.cu_rows, shape.ttt_steps) & batch.counted
        scored = score(module, batch, target, valid, scale)
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
        counted=ones,
        **flat,
    )


def frozen_target(assignment: Assignment) -> FrozenTarget:
    """The target's tensors, its head cut down to the draft vocabulary."""
    tensors = assignment.tensors
    rows = tensors["lm_head"][tensors["target_ids"]]
    return FrozenTarget(tensors["embeddings"], tensors["final_norm"], rows, EPS, tensors["target_ids"])


if __name__ == "__main__":
    serve(build, "drafthead")
