"""speculators' own step: its EAGLE-3 draft model, shift and loss.

On a CPU its fused Triton loss cannot run, so its own option `--loss-implementation eager` takes its place,
and attention is its option `sdpa`. As shipped it keeps lm_head frozen, which saves it a third of the head's
arithmetic and most of the optimiser's memory; `trained` variants let lm_head learn, as the other two
trainers do. Documents come one at a time (`documents`, gradients accumulated, one update) or packed into one
sequence, as its data loader does (`packed`).
"""

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig, shift_batch
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor
from transformers import LlamaConfig

from stepbench.contestant import STEP_DECAY, Assignment, TrainStep, adamw, serve
from stepbench.inputs import target_config


def build(assignment: Assignment) -> TrainStep:
    """Variants: `documents` or `packed`, then `-frozen` (lm_head as shipped) or `-trained`."""
    shape = assignment.shape
    layout, head = assignment.variant.split("-")
    model = draft_model(assignment)
    model.lm_head.weight.requires_grad_(head == "trained")
    model.train()
    on_cpu = assignment.device == "cpu"
    loss_config = resolve_loss_config("kl_div", "eager" if on_cpu else "fused")
    documents = [shifted(assignment, number) for number in range(shape.batch)]
    sequences = [packed(documents)] if layout == "packed" else [packed([d]) for d in documents]
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])

    def step() -> list[float]:
        sums = torch.zeros(shape.ttt_steps)
        for sequence in sequences:
            _, loss, metrics = model(
                **sequence, ttt_steps=shape.ttt_steps, ttt_step_loss_decay=STEP_DECAY, loss_config=loss_config
            )
            (loss / len(sequences)).backward()
            sums += torch.tensor([float(metrics[f"loss_{k}_sum"]) for k in range(shape.ttt_steps)])
        optimizer.step()
        optimizer.zero_grad()
        decay = torch.tensor([STEP_DECAY**k for k in range(shape.ttt_steps)])  # its step losses carry the weight
        return (sums / decay / len(sequences)).tolist()

    return step


def draft_model(assignment: Assignment) -> Eagle3DraftModel:
    """The model with everyone's weights; the target's come through its own loader."""
    shape, tensors = assignment.shape, assignment.tensors
    layer = LlamaConfig(**{**target_config(shape), "num_hidden_layers": 1})
    layer._attn_implementation = "sdpa" if assignment.device == "cpu" else "simple_flex_attention"
    verifier = VerifierConfig.from_pretrained(str(assignment.target))
    proposal = GreedyTokenProposalConfig(speculative_tokens=shape.ttt_steps)
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=shape.draft_vocab,
            eagle_aux_hidden_state_layer_ids=list(range(shape.layers)),
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3", proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
            ),
        )
    )
    ids = tensors["target_ids"].cpu()
    t2d = torch.zeros(shape.vocab, dtype=torch.bool)
    t2d[ids] = True
    model.load_vocab_mappings(t2d, ids - torch.arange(len(ids)))
    model.load_verifier_weights()
    weights = {
        name.removeprefix("draft.").replace("midlayer.", "layers.0."): value
        for name, value in tensors.items()
        if name.startswith("draft.")
    }
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    return model.to(assignment.device, getattr(torch, shape.dtype))


def shifted(assignment: Assignment, number: int) -> dict[str, Tensor]:
    """One document through its own shift: T - 1 positions."""
    tensors, T = assignment.tensors, assignment.shape.tokens
    return shift_batch(
        {
            "input_ids": tensors["input_ids"][number],
            "hidden_states": tensors["aux"][number],
            "verifier_last_hidden_states": tensors["last_hidden"][number],
            "loss_mask": tensors["loss_mask"][number],
            "lengths": torch.tensor([T]),
            "position_ids": torch.arange(T),
        }
    )


def packed(documents: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Documents end to end, as its collate function lays them out (without padding)."""
    names = ("input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask", "position_ids")
    device = documents[0]["input_ids"].device
    sequence = {name: torch.cat([d[name].to(device) for d in documents])[None] for name in names}
    lengths = torch.tensor([len(d["input_ids"]) for d in documents])
    sequence["document_ids"] = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None].to(device)
    return sequence


if __name__ == "__main__":
    serve(build, "speculators")
