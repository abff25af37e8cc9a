"""One optimiser step.

The loss of TTT step k is divided by the number of valid positions of the whole optimiser step, counted
from the masks beforehand. So the same data gives the same gradient at any micro batch size, accumulation
or rank count, and no count has to be exchanged between ranks.
"""

import math
from dataclasses import asdict

import torch
from torch import Tensor

from drafthead.config import TrainConfig
from drafthead.core.alignment import shift, valid_positions
from drafthead.core.losses import HeadLoss
from drafthead.data.packing import PackedBatch
from drafthead.provenance import write_json
from drafthead.training.metrics import StepMetrics, peak_memory_gib
from drafthead.training.objective import score, step_weights
from drafthead.training.run import Run


def learning_rate(config: TrainConfig, step: int, total_steps: int) -> float:
    """Linear warm-up, then a cosine to a tenth of the peak. `step` is 0-based."""
    warmup = max(1, round(config.warmup_ratio * total_steps))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, total_steps - warmup)
    return config.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * progress)))


def train_step(run: Run, step: int) -> tuple[StepMetrics, int]:
    """One optimiser step: this rank's micro batches of the step, one update.

    Returns:
        Metrics over all ranks (rate still zero) and the step's tokens over all ranks.
    """
    config, accelerator, num_steps = run.config, run.accelerator, run.config.num_ttt_steps
    first = step * run.micro_batches_per_step
    group = run.stream[first : first + run.micro_batches_per_step]
    valid_total = torch.tensor([window.valid for windows in group for window in windows]).sum(0).clamp_min(1)  # (K,)
    weights = step_weights(num_steps, config.step_weight_decay)
    # DeepSpeed divides by accumulation steps and averages over ranks: undo both.
    scale = (weights / valid_total * run.micro_batches_per_step).to(accelerator.device, torch.float32)
    rate = learning_rate(config, step, run.total_steps)
    for parameters in run.optimizer.param_groups:
        parameters["lr"] = rate

    sums = torch.zeros(2 * num_steps + 1, dtype=torch.float64, device=accelerator.device)
    for windows in group[accelerator.process_index :: accelerator.num_processes]:
        batch = run.load(run.inputs.train, windows)
        valid = valid_positions(batch.loss_mask, batch.layout.cu_rows, num_steps) & batch.counted
        assert valid.sum(1).tolist() == torch.tensor([w.valid for w in windows]).sum(0).tolist(), "counted otherwise"
        with accelerator.accumulate(run.engine):
            scored = score(run.engine, batch, run.target, valid, scale)
            _check_finite(run, scored, step, batch)
            accelerator.backward(scored.loss)
            run.optimizer.step()
            run.optimizer.zero_grad()
        sums += torch.cat([scored.step_sums, _hits(run, scored, batch), sums.new_tensor([len(batch.input_ids)])])
    sums = accelerator.reduce(sums, "sum").cpu()
    grad_norm = float(run.engine.get_global_grad_norm() or 0.0)
    if not math.isfinite(grad_norm):
        raise FloatingPointError(
            f"gradient norm {grad_norm} at step {step + 1} with finite losses; the weights of step {run.state.step} "
            "are safe in the last checkpoint. Lower train.learning_rate"
        )
    per_step, hits = sums[:num_steps] / valid_total, sums[num_steps : 2 * num_steps] / valid_total
    metrics = StepMetrics(
        step=step + 1, loss=float((per_step * weights).sum()), loss_per_step=tuple(per_step.tolist()),
        accuracy_per_step=tuple(hits.tolist()), grad_norm=grad_norm, learning_rate=rate, tokens_per_second=0.0,
        memory_gib=peak_memory_gib(),
    )  # fmt: skip
    return metrics, int(sums[-1])


def _hits(run: Run, scored: HeadLoss, batch: PackedBatch) -> Tensor:
    """(K,) positions where the draft's first choice is the target's, whole vocabulary."""
    predictions = scored.predictions
    proposed = torch.where(predictions >= 0, run.target.target_ids[predictions.clamp_min(0)], -1)
    # Step k at row t is the target's choice at t + 1 + k. Unscored rows hold -1 and never match.
    wanted = torch.stack([shift(batch.argmax, 1 + k, -2) for k in range(len(proposed))])
    return (proposed == wanted).sum(1)


def _check_finite(run: Run, scored: HeadLoss, step: int, batch: PackedBatch) -> None:
    """Stop before a loss that is not finite reaches the weights; leaves a record of what was read.

    Raises:
        FloatingPointError: names the step, the losses and the record.
    """
    if torch.isfinite(scored.loss):
        return
    record = run.recipe.run_dir / f"nonfinite_step_{step + 1:08d}.json"
    finite = {name: bool(torch.isfinite(getattr(batch, name)).all()) for name in ("aux", "last_hidden")}
    write_json(record, {"step": step + 1, "ids": batch.ids, "inputs_finite": finite, **asdict(run.state)})
    raise FloatingPointError(
        f"loss {float(scored.loss)} at step {step + 1} (per TTT step: {scored.step_sums.tolist()}; finite inputs: "
        f"{finite}); sequences are listed in {record}. The weights of step {run.state.step} are safe in the last "
        "checkpoint. Harvest those sequences again if their states are not finite, else lower train.learning_rate"
    )
