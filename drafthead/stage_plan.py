"""What a stage will take, said by `--dry-run` before it is begun: GPUs, memory, disk, hours and price, all in one form.

Every stage fills in a `StagePlan`; `data_gen/dry_run.py` puts all of them into one table. What a plan cannot know yet
(how many prompts there will be, how long answers are) is an option with its default said beside the figure.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.table import Table

DRY_RUN = ("--dry-run", {"action": "store_true", "help": "print what this will take and run nothing"})
PROMPTS, _PROMPT_TOKENS = 100_000, 1_000  # where nothing says otherwise


@dataclass(frozen=True)
class Assumed:
    """What a plan takes for granted where nothing on disk says it.

    Attributes:
        prompts: training conversations; None: what the recipe says.
        prompt_tokens: of a prompt.
        answer_tokens: of an answer; None: as many as the recipe allows, an upper bound.
        gpus: of the stage; None: what the recipe needs.
        gpu: name of the GPU, from drafthead/engine/rates.py.
        tokens_per_second: somebody's measured rate; None: the one this project measured, else an assumption.
    """

    prompts: int | None = None
    prompt_tokens: int = _PROMPT_TOKENS
    answer_tokens: int | None = None
    gpus: int | None = None
    gpu: str = "h100"
    tokens_per_second: float | None = None

    def __post_init__(self) -> None:
        for name in ("prompts", "prompt_tokens", "answer_tokens", "gpus", "tokens_per_second"):
            if (value := getattr(self, name)) is not None and value <= 0:
                raise ValueError(f"--{name.replace('_', '-')} {value:g} must be positive")


AMOUNTS = (
    ("--prompts", {"type": int, "metavar": "N", "help": "training conversations, while none are drawn (default: the "
                   f"recipe's, else {PROMPTS:,}, the size of a public mix)"}),
    ("--prompt-tokens", {"type": int, "metavar": "N", "default": _PROMPT_TOKENS,
                         "help": f"of a prompt, while none are drawn (default: {_PROMPT_TOKENS:,}, between a chat's "
                         "hundreds and a long workload's thousands)"}),
    ("--answer-tokens", {"type": int, "metavar": "N",
                         "help": "of an answer, while there are none (default: all that max_tokens allows)"}),
)  # fmt: skip
GPU = ("--gpu", {"default": "h100", "help": "h100, h200, a100, b200 or l40s: its data sheet gives the rates that "
                 "nobody measured (default: h100)"})  # fmt: skip
GPUS = ("--gpus", {"type": int, "metavar": "N", "help": "of the stage, with --dry-run"})
RATE = (
    "--tokens-per-second",
    {"type": float, "metavar": "RATE", "help": "measured by you: with --dry-run, hours come from it"},
)


def assumed_from(args: argparse.Namespace) -> Assumed:
    """What the command line says; options that a script does not have keep their defaults."""
    known = {name: getattr(args, name) for name in Assumed.__dataclass_fields__ if hasattr(args, name)}
    return Assumed(**known)


@dataclass(frozen=True)
class StagePlan:
    """What one stage will take.

    Attributes:
        stage: its name.
        work: what it does, in numbers.
        gpus: that it holds, all together.
        memory_bytes: of each of them; None: none is used.
        disk_bytes: written, at most at once.
        hours: by the clock; None: no work for a GPU.
        rate: what the hours were reckoned with, and where that comes from.
        price_per_gpu_hour: the recipe's eval.price_per_gpu_hour.
        notes: what else to know, a sentence each.
    """

    stage: str
    work: str
    gpus: int = 0
    memory_bytes: int | None = None
    disk_bytes: int = 0
    hours: float | None = None
    rate: str = ""
    price_per_gpu_hour: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def price(self) -> float | None:
        """In the currency of the price of an hour."""
        if self.hours is None or self.price_per_gpu_hour is None:
            return None
        return self.hours * self.gpus * self.price_per_gpu_hour


def size_text(num_bytes: int) -> str:
    """In TiB, GiB or MiB."""
    for unit, power in (("TiB", 40), ("GiB", 30)):
        if num_bytes >= 2**power:
            return f"{num_bytes / 2**power:,.1f} {unit}"
    return f"{num_bytes / 2**20:,.1f} MiB"


def hours_text(hours: float) -> str:
    """Two digits below ten hours, whole hours above."""
    return f"{hours:,.2f}" if hours < 10 else f"{hours:,.0f}"


def print_stage(plan: StagePlan) -> None:
    """The lines of one stage."""
    print(f"{plan.stage}: {plan.work}")
    if plan.memory_bytes is not None:
        print(f"GPUs       {plan.gpus}, {size_text(plan.memory_bytes)} on each")
    print(f"disk       {size_text(plan.disk_bytes)}")
    if plan.hours is not None:
        print(f"time       {hours_text(plan.hours)} hours at {plan.rate}")
        if plan.price is None:
            print("price      not known: set eval.price_per_gpu_hour")
        else:
            print(f"price      {plan.price:,.2f} at {plan.price_per_gpu_hour:,.2f} per GPU and hour")
    for note in plan.notes:
        print(f"           {note}")


def print_stages(plans: Sequence[StagePlan], title: str) -> None:
    """All stages in one table with their sum, and below it what the figures stand on."""
    table = Table("stage", "work", title=title)
    for column in ("GPUs", "memory per GPU", "disk", "hours", "price"):
        table.add_column(column, justify="right")
    for plan in plans:
        memory = "" if plan.memory_bytes is None else size_text(plan.memory_bytes)
        table.add_row(plan.stage, plan.work, *_cells(plan.gpus, memory, plan.disk_bytes, plan.hours, plan.price))
    most = max((plan.memory_bytes or 0 for plan in plans), default=0)
    prices = [plan.price for plan in plans if plan.hours is not None]
    table.add_section()
    table.add_row(
        "all", "one after the other",
        *_cells(max(plan.gpus for plan in plans), size_text(most), sum(plan.disk_bytes for plan in plans),
                sum(plan.hours or 0 for plan in plans),
                None if None in prices else sum(price or 0 for price in prices)),
    )  # fmt: skip
    console = Console()
    console.print(table)
    said: dict[str, list[str]] = {}  # what stages have in common is said once
    for plan in plans:
        for line in (*((f"hours at {plan.rate}",) if plan.rate else ()), *plan.notes):
            said.setdefault(line, []).append(plan.stage)
    for line, stages in said.items():
        console.print(f"{', '.join(stages)}: {line}", highlight=False, markup=False)


def _cells(gpus: int, memory: str, disk_bytes: int, hours: float | None, price: float | None) -> tuple[str, ...]:
    return (
        str(gpus) if gpus else "", memory, size_text(disk_bytes) if disk_bytes else "",
        "" if hours is None else hours_text(hours), "" if price is None else f"{price:,.2f}",
    )  # fmt: skip
