"""speculators' own step: its draft models, shift and losses.

On a CPU its fused Triton loss cannot run, so its own option `--loss-implementation eager` takes its place,
and attention is its option `sdpa`. As shipped it keeps lm_head frozen, which saves it a third of the head's
arithmetic and most of the optimiser's memory; `trained` variants let lm_head learn, as the other two
trainers do. Documents come one at a time (`documents`, gradients accumulated, one update) or packed into one
sequence, as its data loader does (`packed`).

P-EAGLE, DFlash and DSpark come in documents, with its defaults but for K, and lm_head trained: rows of P-EAGLE thinned
by 0.7 a depth, 512 anchors of DFlash and DSpark in each document. Embeddings, which its P-EAGLE trains, are frozen.
"""

from importlib import import_module
from typing import Any

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import shift_batch
from speculators.proposals.greedy import GreedyTokenProposalConfig
from speculators.train.config.schema import OptimizerArgs, TrainConfig
from speculators.train.optimizers import build_optimizers
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config, get_linear_schedule_with_warmup

from stepbench.contestant import STEP_DECAY, Assignment, Done, TrainStep, adamw, serve
from stepbench.inputs import MASK, target_config
from stepbench.training import EMBEDDING, Documents, Plan

_CLASSES = ("SpeculatorConfig", "DraftModel")  # how its names end


def build(assignment: Assignment) -> TrainStep:
    """Variants: `documents` or `packed`, then `-frozen` (lm_head as shipped) or `-trained`; others: `documents`."""
    if assignment.drafter != "eagle3":
        return build_parallel(assignment)
    shape = assignment.shape
    layout, head = assignment.variant.split("-")
    model = draft_model(assignment)
    model.lm_head.weight.requires_grad_(head == "trained")
    model.train()
    on_cpu = assignment.device == "cpu"
    loss_config = resolve_loss_config("kl_div", "eager" if on_cpu else "fused")
    documents = [shifted(document) for document in stored(assignment)]
    sequences = [packed(documents)] if layout == "packed" else [packed([d]) for d in documents]
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])

    def step() -> Done:
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
        return Done((sums / decay / len(sequences)).tolist())

    return step


def build_parallel(assignment: Assignment) -> TrainStep:
    """A head that fills all positions in one pass, document by document."""
    shape = assignment.shape
    sizes: dict = {"dflash": {"block_size": shape.ttt_steps + 1}, "dspark": {"block_size": shape.ttt_steps}}
    settings = {"mask_token_id": MASK, **sizes.get(assignment.drafter, {})}
    layers = "eagle_aux_hidden_state_layer_ids" if assignment.drafter == "peagle" else "aux_hidden_state_layer_ids"
    model = with_target(assignment, f"speculators.models.{assignment.drafter}", layers, **settings)
    model.lm_head.weight.requires_grad_(True)
    model.embed_tokens.weight.requires_grad_(False)
    model.train()
    options = {"num_depths": shape.ttt_steps} if assignment.drafter == "peagle" else {}
    loss_config = resolve_loss_config("kl_div", "eager" if assignment.device == "cpu" else "fused")
    align = shifted if assignment.drafter == "peagle" else unshifted
    sequences = [packed([align(document)]) for document in stored(assignment)]
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])

    def step() -> Done:
        rows, losses = 0, []
        for sequence in sequences:
            _, loss, metrics = model(**sequence, loss_config=loss_config, **options)
            (loss / len(sequences)).backward()
            rows += int(metrics["full_acc_total"])
            losses.append(float(loss))
        optimizer.step()
        optimizer.zero_grad()
        return Done(losses, rows)

    return step


def draft_model(assignment: Assignment, **settings: Any) -> Any:
    """The EAGLE-3 model with everyone's weights; `settings` as for `with_target`."""
    tensors = assignment.tensors
    model = with_target(assignment, "speculators.models.eagle3", "eagle_aux_hidden_state_layer_ids", **settings)
    weights = {
        name.removeprefix("draft.").replace("midlayer.", "layers.0."): value
        for name, value in tensors.items()
        if name.startswith("draft.")
    }
    assert not model.load_state_dict(weights, strict=False).unexpected_keys
    return model


def with_target(assignment: Assignment, module: str, layers: str, **settings: Any) -> Any:
    """A model of one of its modules, on the device; what it takes from the target comes through its own loader.

    Args:
        assignment: shape, device and tensors.
        module: module that has the model and its configuration.
        layers: the configuration's name for aux layers.
        settings: further fields of the configuration.
    """
    shape, kind = assignment.shape, assignment.drafter
    names = vars(import_module(module))
    config_class, model_class = (next(names[n] for n in names if n.endswith(end)) for end in _CLASSES)
    family = LlamaConfig if "eagle" in kind else Qwen3Config
    layer_config = {**target_config(shape), "num_hidden_layers": 1, "model_type": family.model_type}
    layer = family(**layer_config)
    layer._attn_implementation = "sdpa" if assignment.device == "cpu" else "simple_flex_attention"
    verifier = VerifierConfig.from_pretrained(str(assignment.target))
    proposal = GreedyTokenProposalConfig(speculative_tokens=shape.ttt_steps)
    speculators = SpeculatorsConfig(
        algorithm=kind, proposal_methods=[proposal], default_proposal_method="greedy", verifier=verifier
    )
    model = model_class(
        config_class(
            transformer_layer_config=layer, draft_vocab_size=shape.draft_vocab, speculators_config=speculators,
            **{layers: list(range(shape.layers))}, **settings,
        )
    )  # fmt: skip
    ids = assignment.tensors["target_ids"].cpu()
    t2d = torch.zeros(shape.vocab, dtype=torch.bool)
    t2d[ids] = True
    model.load_vocab_mappings(t2d, ids - torch.arange(len(ids)))
    model.load_verifier_weights()
    return model.to(assignment.device, getattr(torch, shape.dtype))


def stored(assignment: Assignment) -> list[dict[str, Tensor]]:
    """The B documents of a step, as `Documents` gives those of a store."""
    names = ("input_ids", "aux", "last_hidden", "loss_mask")
    return [{name: assignment.tensors[name][i] for name in names} for i in range(assignment.shape.batch)]


def unshifted(document: dict[str, Tensor]) -> dict[str, Tensor]:
    """One document as it is: T positions."""
    return {
        "input_ids": document["input_ids"],
        "hidden_states": document["aux"],
        "verifier_last_hidden_states": document["last_hidden"],
        "loss_mask": document["loss_mask"],
        "position_ids": torch.arange(len(document["input_ids"])),
    }


def shifted(document: dict[str, Tensor]) -> dict[str, Tensor]:
    """One document through its own shift: T - 1 positions."""
    return shift_batch({**unshifted(document), "lengths": torch.tensor([len(document["input_ids"])])})


def packed(documents: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Documents end to end, as its collate function lays them out (without padding)."""
    names = ("input_ids", "hidden_states", "verifier_last_hidden_states", "loss_mask", "position_ids")
    device = documents[0]["input_ids"].device
    sequence = {name: torch.cat([d[name].to(device) for d in documents])[None] for name in names}
    lengths = torch.tensor([len(d["input_ids"]) for d in documents])
    sequence["document_ids"] = torch.repeat_interleave(torch.arange(len(lengths)), lengths)[None].to(device)
    return sequence


class SpeculatorsTrainee:
    """Its model, its optimisers and schedule, and its trainer's clipping, one document at a time.

    Variants: `same` (unrolled as the recipe is, no further norms, lm_head trained, AdamW at the recipe's rate) and
    `shipped` (its defaults for all of these; they freeze lm_head, and Muon steps matrices).
    """

    def __init__(self, assignment: Assignment, plan: Plan):
        shipped, steps = assignment.variant == "shipped", len(plan.steps)
        shape, defaults = assignment.shape, TrainConfig()
        self._unroll: dict[str, Any] = {"ttt_steps": shape.ttt_steps, "ttt_step_loss_decay": STEP_DECAY}
        chosen = OptimizerArgs(optimizer="adamw", lr=plan.learning_rate)
        self.head: dict[str, bool] = {}
        if shipped:
            self._unroll = {name: getattr(defaults.loss, name) for name in self._unroll}
            chosen = defaults.optimizer
            self.head = {name: getattr(defaults.draft, name) for name in ("norm_before_residual", "norm_before_fc")}
        self.rope = target_config(shape)["rope_parameters"]
        self._plan, self._documents, self._validation = plan, Documents(plan.train), Documents(plan.validation)
        self._model = draft_model(assignment, **self.head)
        self._model.lm_head.weight.requires_grad_(not shipped)
        self._model.train()
        self._unroll["loss_config"] = resolve_loss_config(defaults.loss.loss_fn, "eager")
        self._optimizers = build_optimizers(self._model, chosen)
        self._schedules = [get_linear_schedule_with_warmup(o, steps // 100, steps) for o in self._optimizers]
        for step in range(min(2, steps)):  # as for SpecForge, though nothing of it is compiled on a CPU
            self._backward(self.prepare(step))
        self._model.zero_grad()

    def prepare(self, step: int) -> list[dict[str, Tensor]]:
        return [packed([shifted(self._documents[index])]) for index in self._plan.steps[step]]

    def step(self, batch: list[dict[str, Tensor]]) -> None:
        self._backward(batch)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        for part in (*self._optimizers, *self._schedules):
            part.step()
        self._model.zero_grad()

    def weights(self) -> dict[str, Tensor]:
        left_out = (EMBEDDING, "verifier_", "d2t", "t2d")
        tensors = {name: v for name, v in self._model.state_dict().items() if not name.startswith(left_out)}
        return {name.replace("layers.0.", "midlayer."): value for name, value in tensors.items()}

    def drafts(self) -> Tensor:
        drafts, *_ = self._model(**packed([shifted(self._validation[self._plan.checked])]), **self._unroll)
        return torch.cat(drafts)

    def _backward(self, batch: list[dict[str, Tensor]]) -> None:
        tokens = [
            sequence["loss_mask"].sum() for sequence in batch
        ]  # its own batches are packed and weigh tokens alike
        for sequence, sequence_tokens in zip(batch, tokens, strict=True):
            _, loss, _ = self._model(**sequence, **self._unroll)
            (loss * sequence_tokens / sum(tokens)).backward()


if __name__ == "__main__":
    serve(build, "speculators", SpeculatorsTrainee)
