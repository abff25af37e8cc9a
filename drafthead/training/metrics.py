"""What a run reports: one readable line, one JSON line, and a tracker if the recipe names one."""

import json
import logging
import resource
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from drafthead.config import Recipe
from drafthead.files import atomic_path
from drafthead.statistics import few
from drafthead.tracking import wandb_run

logger = logging.getLogger(__name__)
METRICS = "metrics.jsonl"
_LOG_LINES = 50  # a run prints about as many, whatever its length


@dataclass(frozen=True)
class StepMetrics:
    """One optimiser step.

    Attributes:
        step: number of the optimiser step, from 1.
        loss: weighted sum over draft positions of the mean loss, in the objective's unit.
        loss_per_step: mean loss of each draft position per scored row.
        accuracy_per_step: share of scored rows where the draft's first choice is the target's.
        grad_norm: norm of the gradient before clipping.
        learning_rate: learning rate of this step.
        memory_gib: peak memory of rank 0 in GiB: GPU memory if there is a GPU, else resident memory.
        acceptance_length: acceptance length at the served K, predicted by the last validation; 0 before the first.
        acceptance_per_position: joint prefix acceptance of draft tokens 1..K, from the last validation.
        acceptance_prompts: number of responses that were replayed.
        tokens_per_second: training tokens per second over all ranks, since the last validation.
        eta_seconds: seconds until the last step, at this rate.
        step_seconds: wall time since the step before, with waiting, validation and checkpoint: the cost of the head.
    """

    step: int
    loss: float
    loss_per_step: tuple[float, ...]
    accuracy_per_step: tuple[float, ...]
    grad_norm: float
    learning_rate: float
    memory_gib: float
    acceptance_length: float
    acceptance_per_position: tuple[float, ...]
    acceptance_prompts: int = 0
    tokens_per_second: float = 0.0
    eta_seconds: float = 0.0
    step_seconds: float = 0.0

    def line(self) -> str:
        """Fixed order and width; a question mark behind an acceptance length of too few prompts."""
        mark = "?" if self.acceptance_per_position and few(self.acceptance_prompts) else " "
        losses = " ".join(f"{value:6.3f}" for value in self.loss_per_step)
        accuracies = " ".join(f"{value:5.3f}" for value in self.accuracy_per_step)
        accepted = " ".join(f"{value:5.3f}" for value in self.acceptance_per_position)
        return (
            f"step {self.step:6d}  loss {self.loss:7.4f}  loss/step {losses}  top1/step {accuracies}  "
            f"accept {self.acceptance_length:5.3f}{mark}[{accepted}]  grad {self.grad_norm:7.3f}  "
            f"lr {self.learning_rate:.2e}  {self.tokens_per_second:8.0f} tok/s  {self.memory_gib:5.2f} GiB  "
            f"eta {timedelta(seconds=round(self.eta_seconds))}"
        )


@dataclass(frozen=True)
class Validation:
    """Result of a pass over the validation split.

    Attributes:
        first_step_loss: mean loss of the first draft position per row.
        acceptance_length: acceptance length by replay, at the K to be served.
        acceptance_per_position: joint prefix acceptance of draft tokens 1..K.
        rounds, prompts: number of replayed rounds, and of the responses that they belong to.
        looping: whether all of these responses loop.
    """

    first_step_loss: float
    acceptance_length: float
    acceptance_per_position: tuple[float, ...]
    rounds: int
    prompts: int
    looping: bool


class MetricsLog:
    """metrics.jsonl of a run, a status line now and then, and the tracker. Only the first rank writes.

    Entries past the resumed step are dropped, so a step appears once.
    """

    def __init__(self, accelerator: Any, run_dir: Path, resumed_step: int, total_steps: int):
        self._accelerator, self._path = accelerator, run_dir / METRICS
        self._total_steps, self._log_every = total_steps, max(1, total_steps // _LOG_LINES)
        self._before = time.perf_counter()
        self.restart_clock(resumed_step)
        if accelerator.is_main_process:
            lines = []
            if self._path.exists() and resumed_step:  # a run that begins validates a head it starts from, as step 0
                lines = [line for line in self._path.read_text().splitlines() if _step_of(line) <= resumed_step]
            with atomic_path(self._path) as temporary:
                temporary.write_text("".join(line + "\n" for line in lines))

    def restart_clock(self, step: int) -> None:
        """Tokens per second and the time left are those of the steps from here on."""
        self._since, self._first, self._tokens = time.perf_counter(), step, 0

    def step(self, metrics: StepMetrics, tokens: int) -> None:
        """Write one optimiser step, and its rates from its `tokens` of all ranks."""
        now = time.perf_counter()
        self._tokens += tokens
        seconds, left = now - self._since, self._total_steps - metrics.step
        metrics = replace(
            metrics,
            tokens_per_second=self._tokens / seconds,
            eta_seconds=seconds / (metrics.step - self._first) * left,
            step_seconds=now - self._before,
        )
        self._before = now
        self._write("train", asdict(metrics))
        if metrics.step % self._log_every == 0 or not left:
            logger.info(metrics.line())

    def validation(self, step: int, result: Validation) -> None:
        """Write one validation."""
        self._write("validation", {"step": step, **asdict(result)})
        rates = " ".join(f"{rate:.3f}" for rate in result.acceptance_per_position)
        logger.info(
            f"step {step:6d}  validation: acceptance length {result.acceptance_length:.3f}{few(result.prompts)} "
            f"(replay of {result.rounds} rounds), per position {rates}, first-step loss {result.first_step_loss:.4f}"
        )
        if result.looping and self._accelerator.is_main_process:
            logger.warning(
                f"all {result.prompts} validation responses loop: acceptance is predicted on them, which says "
                "little of other text; regenerate validation with other prompts or a larger responses.max_tokens"
            )

    def seconds(self) -> float:
        """Wall time of all steps logged, over every start of the run."""
        entries = map(json.loads, self._path.read_text().splitlines())
        return sum(entry.get("step_seconds", 0.0) for entry in entries)

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        if self._accelerator.is_main_process:
            with self._path.open("a") as file:
                file.write(json.dumps({"kind": kind, **values}, allow_nan=False) + "\n")
        self._accelerator.log(flatten(values, kind), step=values["step"])  # nothing without a tracker


def start_tracker(accelerator: Any, recipe: Recipe) -> None:
    """Open the recipe's tracker with the recipe as its configuration.

    Raises:
        ValueError: its package is not installed.
    """
    if not accelerator.log_with:
        raise ValueError(
            f"train.tracker {recipe.train.tracker} is not installed: pip install "
            f"{'tensorboardX' if recipe.train.tracker == 'tensorboard' else recipe.train.tracker}, "
            "or set train.tracker to none (metrics.jsonl is written in any case)"
        )
    values = flatten(recipe.model_dump(mode="json"))
    # TensorBoard takes scalars only.
    accelerator.init_trackers(
        recipe.name,
        config={k: v if isinstance(v, int | float | str) else str(v) for k, v in values.items()},
        # One rank opens the run; the others do not make an id for it.
        init_kwargs={"wandb": wandb_run(recipe)} if accelerator.is_main_process else {},
    )


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings and sequences as one level, keys joined by a slash."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        key = f"{prefix}/{name}" if prefix else name
        if isinstance(value, list | tuple):
            value = {str(i): item for i, item in enumerate(value)}
        flat.update(flatten(value, key) if isinstance(value, Mapping) else {key: value})
    return flat


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError):  # the line a kill cut short
        return float("inf")


def peak_memory_gib() -> float:
    """Peak memory of this process: GPU memory if there is one, else resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # of kilobytes
