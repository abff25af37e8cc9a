"""What a run says about itself: one readable line, one JSON line, and a tracker if the recipe names one."""

import json
import resource
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from drafthead.provenance import atomic_path


@dataclass(frozen=True)
class StepMetrics:
    """One optimiser step.

    Attributes:
        step: 1-based.
        loss: weighted sum over TTT steps of the mean loss, in the objective's unit.
        loss_per_step: mean loss of each TTT step per valid position.
        accuracy_per_step: share of valid positions where the draft's first choice is the target's.
        grad_norm: before clipping.
        learning_rate: of this step.
        tokens_per_second: over all ranks, since the last logged step.
        memory_gib: peak of rank 0, GPU memory if there is one, else resident.
    """

    step: int
    loss: float
    loss_per_step: tuple[float, ...]
    accuracy_per_step: tuple[float, ...]
    grad_norm: float
    learning_rate: float
    tokens_per_second: float
    memory_gib: float

    def line(self) -> str:
        """Fixed order and width."""
        losses = " ".join(f"{value:6.3f}" for value in self.loss_per_step)
        accuracies = " ".join(f"{value:5.3f}" for value in self.accuracy_per_step)
        return (
            f"step {self.step:6d}  loss {self.loss:7.4f}  loss/step {losses}  top1/step {accuracies}  "
            f"grad {self.grad_norm:7.3f}  lr {self.learning_rate:.2e}  {self.tokens_per_second:8.0f} tok/s  "
            f"{self.memory_gib:5.2f} GiB"
        )


class MetricsLog:
    """metrics.jsonl of a run; entries past the resumed step are dropped, so a step appears once."""

    def __init__(self, path: Path, resumed_step: int):
        self._path = path
        kept = []
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _step_of(line) <= resumed_step]
        with atomic_path(path) as temporary:
            temporary.write_text("".join(line + "\n" for line in kept))

    def write(self, kind: str, values: dict) -> None:
        """Append one entry."""
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")

    def write_step(self, metrics: StepMetrics) -> None:
        """Append one optimiser step."""
        self.write("train", asdict(metrics))


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError):  # the line a kill cut short
        return float("inf")


def peak_memory_gib() -> float:
    """Peak memory of this process: GPU memory if there is one, else resident set."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return kilobytes / 2**20 if sys.platform != "darwin" else kilobytes / 2**30
