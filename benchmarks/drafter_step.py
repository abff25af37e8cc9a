"""One training step of every drafter, beside the time that its own matrix products take at this machine's best rate.

    python benchmarks/drafter_step.py                          # CPU, about three minutes
    python benchmarks/drafter_step.py --shape gpt-oss-120b     # GPU
    python benchmarks/drafter_step.py --shape tiny             # the same code anywhere

A step is forward, loss, backward and AdamW on the tensors of train_step.py, at the same K. Products, those of flash
attention among them, are counted by torch while one step runs; their time is that of the fastest product of the
draft head's shape. Drafters take turns, so what else the machine does hits all alike. Ratio: time over that.
"""

import argparse
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file
from stepbench import ours
from stepbench.contestant import Assignment, adamw
from stepbench.inputs import EPS, ROPE_THETA, write_inputs
from stepbench.peak import HeadProducts
from stepbench.shapes import SHAPES, Shape
from torch.utils.flop_counter import FlopCounterMode

from drafthead.drafters.base import DraftShape
from drafthead.drafters.registry import drafter_of, drafters, parse_head
from drafthead.training.trainer import LossModule


def head_section(kind: str, shape: Shape) -> dict:
    """The recipe's head section of a drafter at a shape, with one layer."""
    sizes = {
        "type": kind, "draft_vocab_size": shape.draft_vocab, "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads, "num_key_value_heads": shape.kv_heads, "head_dim": shape.head_dim,
    }  # fmt: skip
    own = {"num_ttt_steps": shape.ttt_steps} if kind == "eagle3" else {
        "num_draft_positions": shape.ttt_steps, "mask_token_id": 0
    }  # fmt: skip
    return sizes | own


class Step:
    """One drafter's step, and how long it took each time."""

    def __init__(self, kind: str, assignment: Assignment):
        shape, device = assignment.shape, assignment.device
        drafter = drafter_of(parse_head(head_section(kind, shape)))
        rope = {"rope_type": "default", "rope_theta": ROPE_THETA}
        module = drafter.build(
            DraftShape(drafter.head, shape.hidden, shape.vocab, shape.layers, EPS, rope, 2 * shape.tokens)
        )
        self._module = LossModule(module.to(device, getattr(torch, shape.dtype)))
        self.parameters = sum(p.numel() for p in module.parameters())
        self._optimizer = adamw(list(self._module.parameters()))
        scored = drafter.trained_rows(torch.ones(shape.tokens)).repeat(1, shape.batch).to(device)
        self._batch = replace(ours.packed_batch(assignment), scored=scored)
        self._target = ours.frozen_target(assignment)
        self._scale = (drafter.position_weights().to(device) / scored.sum(1)).float()
        self._device, self.seconds = device, list[float]()
        with FlopCounterMode(display=False) as counter:
            self._take()
        self.flops = counter.get_total_flops()

    def _take(self) -> None:
        self._module(self._batch, self._target, self._scale).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self._device == "cuda":
            torch.cuda.synchronize()

    def play(self) -> None:
        """Take one step and note its time."""
        started = time.perf_counter()
        self._take()
        self.seconds.append(time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2, help="of the CPU")
    options = parser.parse_args()
    shape = SHAPES[options.shape]
    if shape.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"--shape {shape.name} needs a CUDA GPU and torch finds none: use --shape cpu or tiny")
    torch.set_num_threads(options.threads)
    with TemporaryDirectory(prefix="drafthead-bench-") as directory:
        write_inputs(shape, Path(directory))
        loaded = load_file(Path(directory) / "tensors.safetensors")
        tensors = {name: value.clone().to(shape.device) for name, value in loaded.items()}
    assignment = Assignment(shape, shape.device, "", tensors, Path())
    steps, products = {kind: Step(kind, assignment) for kind in drafters()}, HeadProducts(shape, shape.device)
    for _ in range(options.rounds):
        products.play()
        for step in steps.values():
            step.play()
    table = Table(
        title=f"One step at shape {shape.name}, K = {shape.ttt_steps}; products at {products.best / 1e9:.1f} GFLOP/s"
    )
    for column in ("drafter", "parameters (M)", "GFLOP", "seconds, median", "fastest, slowest", "ratio"):
        table.add_column(column, justify="right")
    for kind, step in steps.items():
        took = median(step.seconds)
        table.add_row(
            kind, f"{step.parameters / 1e6:.1f}", f"{step.flops / 1e9:.1f}", f"{took:.3f}",
            f"{min(step.seconds):.3f}, {max(step.seconds):.3f}", f"{took * products.best / step.flops:.2f}",
        )  # fmt: skip
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
