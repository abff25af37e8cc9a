"""What every stage will take, before it is started; above all stages, and imported by scripts only.

This module is the form of a plan (GPUs, memory, disk, hours) and its table; it imports no torch.
Hours are printed only for a rate that the user measured. What a plan cannot know yet (how many prompts there will be,
how long responses are) is a command-line option; its value stands beside the figure.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

DEFAULT_PROMPTS, DEFAULT_PROMPT_TOKENS, DEFAULT_GPU_GIB = 100_000, 1_000, 80


@dataclass(frozen=True)
class Assumed:
    """What a plan takes from the command line.

    Attributes:
        prompts: training conversations while none are drawn; None: what the recipe says.
        prompt_tokens: of a prompt.
        response_tokens: of a response; None: as many as the recipe allows, an upper bound.
        gpus: of the stage; None: what the recipe needs.
        gpu_memory_gib: of one GPU.
        tokens_per_second: a measured rate; None: no hours.
    """

    prompts: int | None = None
    prompt_tokens: int = DEFAULT_PROMPT_TOKENS
    response_tokens: int | None = None
    gpus: int | None = None
    gpu_memory_gib: float = DEFAULT_GPU_GIB
    tokens_per_second: float | None = None

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} {value:g} must be positive")

    def hours(self, tokens: float) -> float | None:
        """Hours for that many tokens, if a rate is known."""
        return tokens / self.tokens_per_second / 3600 if self.tokens_per_second else None


DRY_RUN = ("--dry-run", {"action": "store_true", "help": "print what this will take and run nothing"})
AMOUNTS = (
    ("--prompts", {"type": int, "metavar": "N", "help": "training conversations, while none are drawn (default: the "
                   f"recipe's, else {DEFAULT_PROMPTS:,}, the size of a public mix)"}),
    ("--prompt-tokens", {"type": int, "metavar": "N", "default": DEFAULT_PROMPT_TOKENS,
                         "help": f"of a prompt, while none are drawn (default: {DEFAULT_PROMPT_TOKENS:,})"}),
    ("--response-tokens", {"type": int, "metavar": "N",
                           "help": "of a response, while there are none (default: all that max_tokens allows)"}),
)  # fmt: skip
GPU_MEMORY = ("--gpu-memory-gib", {"type": float, "metavar": "GIB", "default": DEFAULT_GPU_GIB,
                                   "help": f"of one GPU, with --dry-run (default: {DEFAULT_GPU_GIB})"})  # fmt: skip
GPUS = ("--gpus", {"type": int, "metavar": "N", "help": "of the stage, with --dry-run"})
RATE = ("--tokens-per-second", {"type": float, "metavar": "RATE", "help": "measured by you; with --dry-run: prints "
                                "hours"})  # fmt: skip


def assumed_from(args: argparse.Namespace) -> Assumed:
    """What the command line has; options that a script lacks keep their defaults."""
    return Assumed(**{name: getattr(args, name) for name in Assumed.__dataclass_fields__ if hasattr(args, name)})


@dataclass(frozen=True)
class StagePlan:
    """What one stage will take.

    Attributes:
        stage: its name.
        work: what it does, in numbers.
        gpus: at once; 0: none.
        memory_bytes: on each GPU; 0: none.
        disk_bytes: written, at most at once.
        hours: by the rate of the command line; None without one.
        notes: what else to know, a sentence each.
    """

    stage: str
    work: str
    gpus: int = 0
    memory_bytes: int = 0
    disk_bytes: int = 0
    hours: float | None = None
    notes: Sequence[str] = ()


def size_text(num_bytes: int) -> str:
    """In TiB, GiB or MiB."""
    for unit, power in (("TiB", 40), ("GiB", 30)):
        if num_bytes >= 2**power:
            return f"{num_bytes / 2**power:,.1f} {unit}"
    return f"{num_bytes / 2**20:,.1f} MiB"


def print_plans(plans: Sequence[StagePlan], title: str) -> None:
    """A table of the stages, with their sum where there are several, and the notes below it."""
    table = Table("stage", "work", title=title)
    for column in ("GPUs", "memory per GPU", "disk", "hours"):
        table.add_column(column, justify="right")
    if len(plans) > 1:
        hours = [plan.hours for plan in plans if plan.hours is not None]
        plans = [*plans, StagePlan(
            "all", "one after the other", max(plan.gpus for plan in plans), max(plan.memory_bytes for plan in plans),
            sum(plan.disk_bytes for plan in plans), sum(hours) if hours else None,
        )]  # fmt: skip
    stages_of: dict[str, list[str]] = {}  # a note that several stages share is printed once
    for plan in plans:
        sizes = [size_text(size) if size else "" for size in (plan.memory_bytes, plan.disk_bytes)]
        hours_text = "" if plan.hours is None else f"{plan.hours:,.2f}"
        table.add_row(plan.stage, plan.work, str(plan.gpus or ""), *sizes, hours_text)
        for note in plan.notes:
            stages_of.setdefault(note, []).append(plan.stage)
    console = Console()
    console.print(table)
    for note, stages in stages_of.items():
        console.print(f"{', '.join(stages)}: {note}", highlight=False, markup=False)
