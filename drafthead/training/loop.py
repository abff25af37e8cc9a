"""The training loop: steps, and now and then a validation and a checkpoint."""

import os
import time
from dataclasses import asdict, replace
from pathlib import Path

from torch import Tensor

from drafthead import provenance
from drafthead.config import Recipe
from drafthead.data.packing import pack, plan_epoch
from drafthead.drafters.eagle3.model import frozen_copy
from drafthead.progress import progress_bar
from drafthead.training import checkpoint
from drafthead.training.accelerator import accumulation_steps
from drafthead.training.metrics import MetricsLog
from drafthead.training.objective import TTTObjective
from drafthead.training.run import Run, prepare
from drafthead.training.setup import open_inputs
from drafthead.training.step import train_step
from drafthead.training.validate import Validation, validate
from drafthead.training.weights import consolidated

KIND = "run"
_LOG_LINES = 50  # a run prints about as many, whatever its length


def train(recipe: Recipe) -> Path:
    """Train the recipe's head, or continue where an earlier run stopped.

    Returns:
        The run's directory: checkpoints, metrics.jsonl, manifest.json.

    Raises:
        ArtefactError: inputs are missing, unfinished or do not fit the recipe.
        InUseError: another process is training this run.
        ValueError: the recipe or the environment cannot be trained with.
        FloatingPointError: the loss or a gradient is not finite.
    """
    accumulation_steps(recipe.train)  # a number of ranks that cannot share a step is refused before anything is read
    inputs = open_inputs(recipe)
    # One rank for all: the launcher ends the others with it.
    first = os.environ.get("RANK", "0") == "0"
    if provenance.begin(recipe.run_dir, KIND, inputs.identity, thinned=True, alone=first):
        if first:
            print(f"{recipe.run_dir} is complete; nothing to do")
        return recipe.run_dir
    run = prepare(recipe, inputs)
    log = MetricsLog(recipe.run_dir / "metrics.jsonl", run.state.step) if run.accelerator.is_main_process else None
    fit(run, log)
    if run.accelerator.is_main_process:
        assert log is not None
        counts = {**asdict(run.state), "total_steps": run.total_steps, "train_seconds": round(log.seconds(), 1)}
        provenance.finish(recipe.run_dir, counts)
        print(
            f"best checkpoint: step {run.state.best_step}, predicted acceptance length "
            f"{run.state.best_acceptance_length:.3f} at K={recipe.eval.num_draft_tokens}"
        )
    run.accelerator.wait_for_everyone()
    run.accelerator.end_training()
    return recipe.run_dir


def fit(run: Run, log: MetricsLog | None) -> None:
    """Run the remaining optimiser steps."""
    config = run.config
    log_every = max(1, run.total_steps // _LOG_LINES)
    clock, tokens, start = time.perf_counter(), 0, run.state.step
    before = clock
    run.feed.release(run.state.step)
    if run.inputs.start is not None and run.state.step == 0:
        _judge_start(run, log)
    with progress_bar(run.total_steps, "train", "step", initial=run.state.step, disable=log is None) as bar:
        for step in range(run.state.step, run.total_steps):
            # Online, the states of this step may not be written yet, or the harvester may need room to go on.
            if run.feed.wants_checkpoint(step):
                save_now(run, step, consolidated(run, averaged=config.ema_decay is not None), None)
            run.feed.wait(step)
            metrics, step_tokens = train_step(run, step)
            tokens += step_tokens
            now = time.perf_counter()
            seconds, step_seconds, before = now - clock, now - before, now
            metrics = replace(
                metrics,
                step_seconds=step_seconds,
                tokens_per_second=tokens / seconds,
                eta_seconds=seconds / (step + 1 - start) * (run.total_steps - step - 1),
                acceptance_length=run.state.acceptance_length,
                acceptance_per_position=run.state.acceptance_per_position,
            )
            if log is not None:
                log.write_step(metrics)
                bar.set_postfix(loss=f"{metrics.loss:.3f}", top1=f"{metrics.accuracy_per_step[0]:.3f}", refresh=False)
                if (step + 1) % log_every == 0 or step + 1 == run.total_steps:
                    bar.write(metrics.line())
            run.track(asdict(metrics), "train", step + 1)
            bar.update(1)

            # Now and then: where do we stand, and keep it.
            if (step + 1) % config.checkpoint_every == 0 or step + 1 == run.total_steps:
                weights = consolidated(run, averaged=config.ema_decay is not None)
                result = validate_now(run, weights)
                if log is not None:  # before the checkpoint: a run resumed from there does not validate it again
                    bar.write(_report_validation(run, log, step + 1, result))
                save_now(run, step + 1, weights, result)
                clock, tokens, start = time.perf_counter(), 0, step + 1


def validate_now(run: Run, weights: dict[str, Tensor]) -> Validation:
    """Replay the validation split with the weights that would be exported, each rank its share of the batches.

    A copy outside the engine computes: it needs no gathering, and the moving average can be judged as well.
    """
    store, config = run.inputs.validation, run.config
    draft = frozen_copy(run.shape, weights, run.accelerator.device, run.dtype)
    objective = TTTObjective(draft, config.num_ttt_steps, config.objective, config.zero_hidden_states)
    plan = plan_epoch(run.judged, config.tokens_per_batch, 0, 0)
    batches = (run.load(pack(store, w)) for w in plan[run.accelerator.process_index :: run.accelerator.num_processes])
    return validate(
        objective, config.num_ttt_steps, run.target, batches, run.recipe.eval.num_draft_tokens,
        lambda counts: run.accelerator.reduce(counts.to(run.accelerator.device), "sum").cpu(),
    )  # fmt: skip


def save_now(run: Run, step: int, weights: dict[str, Tensor], result: Validation | None) -> None:
    """Write a checkpoint, note whether it is the best so far (None: not measured), and apply retention."""
    best = run.state
    if result is None:
        length, rates, improved = best.acceptance_length, best.acceptance_per_position, False
    else:
        length, rates = result.acceptance.length, result.acceptance.rates
        # Where every validation answer loops, lengths are NaN and the newest checkpoint counts as the best.
        improved = best.best_step == 0 or not length <= best.best_acceptance_length
    run.state = checkpoint.TrainState(
        step=step,
        world_size=run.accelerator.num_processes,
        zero_stage=run.config.zero_stage,
        acceptance_length=length,
        acceptance_per_position=rates,
        best_step=step if improved else best.best_step,
        best_acceptance_length=length if improved else best.best_acceptance_length,
    )
    checkpoint.save(run.accelerator, run.engine, run.recipe.run_dir, run.state, weights)
    if run.accelerator.is_main_process:
        checkpoint.retain(run.recipe.run_dir, run.config.keep_checkpoints, run.state)
    run.feed.release(step)


def _judge_start(run: Run, log: MetricsLog | None) -> None:
    """What the head is worth that training goes on from: what every later validation is to be compared with."""
    result = validate_now(run, consolidated(run))
    run.state = replace(
        run.state, acceptance_length=result.acceptance.length, acceptance_per_position=result.acceptance.rates
    )
    if log is not None:
        print(_report_validation(run, log, run.state.step, result), flush=True)


def _report_validation(run: Run, log: MetricsLog, step: int, result: Validation) -> str:
    """Write it down; returns a line to read."""
    acceptance = result.acceptance
    rates = " ".join(f"{rate:.3f}" for rate in acceptance.rates)
    values = {
        "first_step_loss": result.loss,
        "acceptance_length": acceptance.length,
        "acceptance_per_position": acceptance.rates,
        "rounds": acceptance.drafts,
    }
    log.write("validation", {"step": step, **values})
    run.track(values, "validation", step)
    return (
        f"step {step:6d}  validation: acceptance length {acceptance.length:.3f} (replay of {acceptance.drafts} "
        f"rounds), per position {rates}, first-step loss {result.loss:.4f}"
    )
