"""The training loop: steps, and now and then a validation and a checkpoint."""

import time
from dataclasses import asdict, replace
from pathlib import Path

from torch import Tensor
from tqdm import tqdm

from drafthead import provenance
from drafthead.config import Recipe
from drafthead.data.packing import plan_epoch
from drafthead.data.windows import whole
from drafthead.progress import progress_bar
from drafthead.training import checkpoint
from drafthead.training.metrics import MetricsLog, StepMetrics
from drafthead.training.run import Run, prepare
from drafthead.training.setup import open_inputs
from drafthead.training.step import train_step
from drafthead.training.validate import Validation, validate

KIND = "run"


def train(recipe: Recipe) -> Path:
    """Train the recipe's head, or continue where an earlier run stopped.

    Returns:
        The run's directory: checkpoints, metrics.jsonl, manifest.json.

    Raises:
        ArtefactError: inputs are missing, unfinished or do not fit the recipe.
        ValueError: the recipe or the environment cannot be trained with.
        FloatingPointError: the loss or a gradient is not finite.
    """
    inputs = open_inputs(recipe)
    if provenance.begin(recipe.run_dir, KIND, inputs.identity):
        print(f"{recipe.run_dir} is complete; nothing to do")
        return recipe.run_dir
    run = prepare(recipe, inputs)
    log = MetricsLog(recipe.run_dir / "metrics.jsonl", run.state.step) if run.accelerator.is_main_process else None
    fit(run, log)
    if run.accelerator.is_main_process:
        provenance.finish(recipe.run_dir, {**asdict(run.state), "total_steps": run.total_steps})
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
    clock, tokens = time.perf_counter(), 0
    run.feed.release(run.state.step)
    with progress_bar(run.total_steps, "train", "step", initial=run.state.step, disable=log is None) as bar:
        for step in range(run.state.step, run.total_steps):
            # Online, the states of this step may not be written yet, or the harvester may need room to go on.
            if run.feed.wants_checkpoint(step):
                save_now(run, step, None)
            run.feed.wait(step)
            metrics, step_tokens = train_step(run, step)
            tokens += step_tokens
            if log is not None:
                rate = tokens / (time.perf_counter() - clock)
                metrics = replace(metrics, tokens_per_second=rate)
                log.write_step(metrics)
                bar.set_postfix(loss=f"{metrics.loss:.3f}", top1=f"{metrics.accuracy_per_step[0]:.3f}", refresh=False)
            bar.update(1)

            # Now and then: where do we stand, and keep it.
            if (step + 1) % config.checkpoint_every == 0 or step + 1 == run.total_steps:
                result = validate_now(run)
                save_now(run, step + 1, result.acceptance.length)
                if log is not None:
                    _report_validation(log, bar, metrics, result)
                clock, tokens = time.perf_counter(), 0
            if config.tracker != "none":
                run.accelerator.log(_flat(metrics), step=step + 1)


def validate_now(run: Run) -> Validation:
    """Replay the validation split. Every rank runs all of it: ZeRO-3 needs their forwards in step."""
    store, num_steps = run.inputs.validation, run.config.num_ttt_steps
    windows = [whole(i, store.tokens(i)[1], num_steps) for i in range(len(store))]  # rounds cross window borders
    batches = (run.load(store, packed) for packed in plan_epoch(windows, run.config.tokens_per_batch, 0, 0))
    run.engine.eval()
    result = validate(run.engine, num_steps, run.target, batches, run.recipe.eval.num_draft_tokens)
    run.engine.train()
    return result


def save_now(run: Run, step: int, acceptance_length: float | None) -> None:
    """Write a checkpoint, note whether it is the best so far (None: not measured), and apply retention."""
    best = run.state
    if acceptance_length is None:
        acceptance_length, improved = best.acceptance_length, False
    else:
        improved = best.best_step == 0 or acceptance_length > best.best_acceptance_length
    run.state = checkpoint.TrainState(
        step=step,
        world_size=run.accelerator.num_processes,
        zero_stage=run.config.zero_stage,
        acceptance_length=acceptance_length,
        best_step=step if improved else best.best_step,
        best_acceptance_length=acceptance_length if improved else best.best_acceptance_length,
    )
    checkpoint.save(run.accelerator, run.engine, run.recipe.run_dir, run.state, consolidated(run))
    if run.accelerator.is_main_process:
        checkpoint.retain(run.recipe.run_dir, run.config.keep_checkpoints, run.state.best_step)
    run.feed.release(step)


def consolidated(run: Run) -> dict[str, Tensor]:
    """float32 master weights under their exported names, with d2t and t2d; collective at ZeRO-3."""
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {}
    for name, parameter in run.accelerator.unwrap_model(run.engine).draft.named_parameters():
        master = safe_get_full_fp32_param(parameter)  # None without a ZeRO optimiser: the parameter is the master
        weights[name] = (parameter if master is None else master).detach().float().cpu().clone()
    return {**weights, "d2t": run.vocabulary.d2t, "t2d": run.vocabulary.t2d}


def _report_validation(log: MetricsLog, bar: tqdm, metrics: StepMetrics, result: Validation) -> None:
    acceptance = result.acceptance
    rates = " ".join(f"{rate:.3f}" for rate in acceptance.rates)
    bar.write(metrics.line())
    bar.write(
        f"  validation: acceptance length {acceptance.length:.3f} (replay of {acceptance.drafts} rounds), "
        f"per position {rates}, first-step loss {result.loss:.4f}"
    )
    values = {"step": metrics.step, "first_step_loss": result.loss, "acceptance_length": acceptance.length}
    log.write("validation", {**values, "acceptance_per_position": acceptance.rates, "rounds": acceptance.drafts})


def _flat(metrics: StepMetrics) -> dict[str, float]:
    """Scalars for a tracker; per-step tuples become numbered keys."""
    flat: dict[str, float] = {}
    for name, value in asdict(metrics).items():
        items = {f"{name}/{k}": v for k, v in enumerate(value)} if isinstance(value, tuple) else {name: value}
        flat.update({f"train/{key}": number for key, number in items.items()})
    return flat
