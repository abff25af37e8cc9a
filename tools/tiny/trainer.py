"""Train a tiny target on CPU in fp32: AdamW, warm-up, constant rate, cosine end, balanced experts where it has any.

Gives up: mixed precision and more than one process; two CPU cores gain nothing from either.
Alternative: `transformers.Trainer`; it hides the per-token weights that make short training enough.
"""

import math
import time

import torch
from torch.nn import functional
from tqdm import tqdm
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from tools.tiny.batches import Batch
from tools.tiny.initial import write_copying_circuit

LEARNING_RATE, FINAL_RATE = 2e-3, 5e-5
WARMUP_STEPS, DECAY_STEPS = 80, 1400
WEIGHT_DECAY = 0.05
ROUTER_WEIGHT = 0.01
CLIP = 1.0


def rate_at(step: int, steps: int) -> float:
    """Learning rate at `step` of `steps`: a linear rise, a plateau, half a cosine at the end.

    The plateau keeps a longer run identical to a shorter one up to where the shorter one decays.
    """
    if step < WARMUP_STEPS:
        return LEARNING_RATE * (step + 1) / WARMUP_STEPS
    progress = max(0.0, (step - (steps - DECAY_STEPS)) / DECAY_STEPS)
    return FINAL_RATE + (LEARNING_RATE - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * progress))


def new_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Return a model with initial weights that depend on the seed alone."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    write_copying_circuit(model)
    if _routed(model):
        # Measured on two cores: grouped_mm 4,400 tokens/s, eager 3,300, batched_mm 170.
        model.set_experts_implementation("grouped_mm")
    return model


def _routed(model: PreTrainedModel) -> bool:
    return hasattr(model.config, "num_local_experts")


def train(model: PreTrainedModel, batches: list[Batch], steps: int) -> dict[str, float]:
    """Run `steps` steps over the batches in order and return loss, token count and seconds."""
    if not 1 <= steps <= len(batches):
        raise ValueError(f"steps is {steps}, but there are {len(batches)} batches: choose 1 to {len(batches)}")
    optimizer = torch.optim.AdamW(_parameter_groups(model), betas=(0.9, 0.97), lr=LEARNING_RATE)
    model.train()
    smooth, tokens, started = 0.0, 0, time.monotonic()
    bar = tqdm(batches[:steps], unit="step", mininterval=5)
    for step, batch in enumerate(bar):
        for group in optimizer.param_groups:
            group["lr"] = rate_at(step, steps)
        loss, balance = batch_loss(model, batch)
        (loss + ROUTER_WEIGHT * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        smooth = loss.item() if step == 0 else 0.98 * smooth + 0.02 * loss.item()
        tokens += int(batch.mask.sum())
        bar.set_postfix(loss=f"{smooth:.3f}", balance=f"{balance.item():.2f}")
    seconds = time.monotonic() - started
    return {"train_loss": smooth, "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}


def batch_loss(model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Weighted cross-entropy of the next tokens, and the router's balance loss (2.0 is even at top-2; 0: dense)."""
    routed = {"output_router_logits": True} if _routed(model) else {}
    out = model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False, **routed)
    losses = _token_losses(out.logits, batch.ids)
    weights = batch.weights[:, 1:]
    return (losses * weights).sum() / weights.sum(), out.aux_loss if routed else losses.new_zeros(())


@torch.no_grad()
def answer_loss(model: PreTrainedModel, batches: list[Batch]) -> float:
    """Mean cross-entropy per token of the assistant's messages alone."""
    model.eval()
    total, count = 0.0, 0.0
    for batch in batches:
        logits = model(input_ids=batch.ids, attention_mask=batch.mask, use_cache=False).logits
        chosen = (batch.weights[:, 1:] == 1.0).float()
        total += float((_token_losses(logits, batch.ids) * chosen).sum())
        count += float(chosen.sum())
    return total / count


def _token_losses(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")


def _parameter_groups(model: PreTrainedModel) -> list[dict[str, object]]:
    """Weight decay for matrices only; biases, norms and sinks stay free."""
    matrices = [p for n, p in model.named_parameters() if p.ndim >= 2 and "bias" not in n]
    undecayed = [p for n, p in model.named_parameters() if p.ndim < 2 or "bias" in n]
    return [
        {"params": matrices, "weight_decay": WEIGHT_DECAY},
        {"params": undecayed, "weight_decay": 0.0},
    ]
