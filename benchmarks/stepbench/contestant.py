"""What runs inside a contestant's process: one step at a time, when the referee asks for it.

The process says `ready`, then answers every line it reads with one JSON line: the first step (a warm-up)
with the memory it took, the following ones with their time and operations. Between steps it sleeps, so contestants can
take turns and what else the machine does hits all of them alike. The answers go to the original stdout;
whatever libraries print there goes to stderr. What it does instead with --train: `stepbench.training`.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import IO, NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.profiler import profile
from torch.utils.flop_counter import flop_registry

from stepbench import training
from stepbench.clock import seconds_of
from stepbench.memory import PeakMemory
from stepbench.shapes import SHAPES, Shape

STEP_DECAY = 0.8  # TTT step k weighs 0.8**k, the default of all three trainers
LEARNING_RATE = 1e-4
_ATTENTION = {f"aten::_scaled_dot_product_flash_attention_for_cpu{part}" for part in ("", "_backward")}


class Done(NamedTuple):
    """One optimiser step: the loss of each draft position as that trainer reports it, and how many rows carried loss,
    all positions together; None: every token at every position."""

    losses: list[float]
    rows: int | None = None


TrainStep = Callable[[], Done]


@dataclass(frozen=True)
class Assignment:
    """What a contestant is asked to do.

    Attributes:
        shape: shape of the step.
        device: "cpu" or "cuda".
        variant: name of one of the contestant's ways of running.
        drafter: `head.type` of the head that is trained.
        tensors: inputs by the names of `inputs.write_inputs`, on the device.
        target: directory of the target in Hugging Face layout.
    """

    shape: Shape
    device: str
    variant: str
    drafter: str
    tensors: dict[str, Tensor]
    target: Path


def adamw(parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The same optimiser for everyone, in torch's leanest form."""
    return torch.optim.AdamW(parameters, lr=LEARNING_RATE, weight_decay=0.0, fused=True)


def serve(
    build: Callable[[Assignment], TrainStep],
    package: str,
    build_trainee: Callable[[Assignment, training.Plan], training.Trainee],
) -> None:
    """Build the step, then run it whenever a line arrives on stdin; with --train a trainee, and stretches of steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, help="of the step")
    parser.add_argument("--train", action="store_true", help="shape and plan are among the inputs")
    parser.add_argument("--inputs", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--variant", required=True)
    parser.add_argument("--drafter", default="eagle3")
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    answers = _private_stdout()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    # Cloned: tensors of load_file are pages of the file, resident only once they are touched.
    tensors = {
        name: value.clone().to(arguments.device)
        for name, value in load_file(arguments.inputs / "tensors.safetensors").items()
    }
    plan = training.Plan.read(arguments.inputs / "plan.json") if arguments.train else None
    shape = plan.shape if plan else SHAPES[arguments.shape]
    assignment = Assignment(
        shape, arguments.device, arguments.variant, arguments.drafter, tensors, arguments.inputs / "target"
    )
    ready = {"ready": True, "version": version(package), "torch": torch.__version__}
    if plan:
        trainee = build_trainee(assignment, plan)
        torch.set_num_threads(arguments.threads)  # a trainer may have set its own
        _answer(answers, ready | {"head": trainee.head, "rope": trainee.rope})
        training.run(trainee, sys.stdin, partial(_answer, answers))
        return
    step = build(assignment)
    _answer(answers, ready)
    for number, _ in enumerate(sys.stdin):
        _answer(answers, _first(step, arguments.device) if number == 0 else _round(step, arguments.device))


def _first(step: TrainStep, device: str) -> dict:
    with PeakMemory(device) as memory:
        timed = _timed(step, device)
    return {
        **timed,
        "memory_bytes": memory.needed,
        "before_bytes": memory.before,
        "memory_from": memory.how,
    }


def _round(step: TrainStep, device: str) -> dict:
    """A timed step, and another whose matrix products are timed, attention's among them, and counted, without it, by
    torch's profiler: a mode of torch that counts refuses compiled attention. Its own work is none of theirs."""
    timed = _timed(step, device)
    with profile(with_flops=True) as profiled:
        seconds_of(step, device)
    products = {str(packet).replace(".", "::") for packet in flop_registry} | _ATTENTION
    kind = f"self_{'device' if device == 'cuda' else device}_time_total"  # microseconds
    events = [e for e in profiled.key_averages() if e.key in products]
    seconds = sum(getattr(e, kind) / 1e6 for e in events)
    return {**timed, "over_products": timed["seconds"] / seconds, "flops": sum(e.flops for e in events)}


def _timed(step: TrainStep, device: str) -> dict:
    done: list[Done] = []
    return {"seconds": seconds_of(lambda: done.append(step()), device), **done[0]._asdict()}


def _private_stdout() -> IO[str]:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _answer(answers: IO[str], message: dict) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
