"""One optimiser step.

The loss of TTT step k is divided by the number of valid positions of the whole optimiser step, counted
from the masks beforehand. So the same data gives the same gradient at any micro batch size, accumulation
or rank count, and no count has to be exchanged between ranks.
"""

import torch
from torch import Tensor

from drafthead.data.packing import PackedBatch
from drafthead.drafters.eagle3.alignment import shift, valid_positions
from drafthead.losses.fused import HeadLoss
from drafthead.training.metrics import StepMetrics, peak_memory_gib
from drafthead.training.nonfinite import stop_unless_finite_gradient, stop_unless_finite_loss
from drafthead.training.objective import score, step_weights
from drafthead.training.optimizer import gradient_norm, schedule
from drafthead.training.run import Run


def train_step(run: Run, step: int) -> tuple[StepMetrics, int]:
    """One optimiser step: this rank's micro batches of the step, one update.

    Returns:
        Metrics over all ranks (rate still zero) and the step's tokens over all ranks.
    """
    config, accelerator, num_steps = run.config, run.accelerator, run.config.num_ttt_steps
    first = step * config.batches_per_step
    group = run.stream[first : first + config.batches_per_step]
    mine = range(first + accelerator.process_index, first + config.batches_per_step, accelerator.num_processes)
    valid_total = torch.tensor([window.valid for windows in group for window in windows]).sum(0).clamp_min(1)  # (K,)
    weights = step_weights(num_steps, config.step_weight_decay)
    # DeepSpeed divides by accumulation steps and averages over ranks: undo both.
    scale = (weights / valid_total * config.batches_per_step).to(accelerator.device, torch.float32)
    rate = schedule(run.optimizer, config, step, run.total_steps)

    sums = torch.zeros(2 * num_steps + 1, dtype=torch.float64, device=accelerator.device)
    for index in mine:
        batch = run.load(run.prefetch.take(index))
        upcoming = index + accelerator.num_processes
        if upcoming in mine or (step + 1 < run.total_steps and run.feed.ready(step + 1)):
            run.prefetch.start(upcoming)
        valid = valid_positions(batch.loss_mask, batch.layout.cu_rows, num_steps) & batch.counted
        assert valid.sum(1).tolist() == torch.tensor([w.valid for w in run.stream[index]]).sum(0).tolist(), (
            "counted otherwise"
        )
        with accelerator.accumulate(run.engine):
            scored = score(run.engine, batch, run.target, valid, scale)
            stop_unless_finite_loss(run, step, batch, scored)
            accelerator.backward(scored.loss)
            run.optimizer.step()
            run.optimizer.zero_grad()
        sums += torch.cat([scored.position_sums, _hits(run, scored, batch), sums.new_tensor([len(batch.input_ids)])])
    sums = accelerator.reduce(sums, "sum").cpu()
    grad_norm = gradient_norm(run.engine)
    stop_unless_finite_gradient(run, step, group, grad_norm)
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
