"""What stages will take, before they are started: tokens, GPUs, memory, disk, and hours where the user has a rate.

This module has the options and the table, and imports no torch; the numbers are in `planning.stages`. It stands above
all stages and is imported by scripts only. What a plan cannot know yet (how many prompts there will be, how long
responses are) is a command-line option, whose value is printed below the table.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass, field

from pydantic import BaseModel, ByteSize, Field, PositiveFloat, PositiveInt, TypeAdapter
from rich.table import Table

from drafthead.config import Recipe
from drafthead.preflight import preflight
from drafthead.progress import terminal

DEFAULT_PROMPTS = 100_000


class Assumed(BaseModel, frozen=True):
    """What a plan takes from the command line, whose other options it ignores."""

    prompts: PositiveInt | None = Field(None, description="training conversations, while none are drawn")
    prompt_tokens: PositiveInt = Field(1_000, description="of a prompt, while there are no responses (1,000)")
    # gpt-oss-120b's mean to MLPerf's prompts, from published throughput; to ShareGPT's 930, to SWE-bench's 2,560.
    response_tokens: PositiveInt = Field(1_460, description="of a response, while there are none (1,460)")
    gpus: PositiveInt | None = Field(None, description="that share the work (all of this machine)")
    gpu_memory_gib: PositiveFloat = Field(80, description="of one GPU (80)")


def positive(text: str) -> float:
    """A number on the command line; argparse makes a message of the error, which names the flag."""
    return TypeAdapter(PositiveFloat).validate_python(text)


AMOUNTS = tuple(
    ("--" + name.replace("_", "-"), {"type": positive, "default": field.default, "help": field.description})
    for name, field in Assumed.model_fields.items()
)
# Of a stage's own script, where the others need --dry-run.
OPTIONS = (
    ("--dry-run", {"action": "store_true", "help": "print what this will take, and run nothing"}),
    *AMOUNTS,
    ("--tokens-per-second", {"type": positive, "help": "measured by you; prints hours"}),
)


@dataclass(frozen=True)
class StagePlan:
    """What one stage will take.

    Attributes:
        stage: name of the stage.
        work: what the stage does, in numbers.
        tokens: number of tokens that a rate counts.
        gpus: number of GPUs used at once.
        memory_bytes: bytes of memory on each GPU.
        disk_bytes: most bytes that the stage has on disk at once.
        engines: number of engines that share the tokens.
        notes: further remarks, a sentence each.
    """

    stage: str
    work: str
    tokens: int
    gpus: int
    memory_bytes: int
    disk_bytes: int
    engines: int = 1
    notes: list[str] = field(default_factory=list)

    def hours(self, rate: float | None) -> float | None:
        """At so many tokens per second of one engine, if that is known."""
        return self.tokens / self.engines / rate / 3600 if rate else None


def dry_run(recipe: Recipe, args: argparse.Namespace, rates: Mapping[str, float | None]) -> None:
    """Print the plan of the stages that `rates` names, each with its measured tokens per second, if any."""
    preflight(recipe, plan=True)
    from drafthead.planning.stages import plan_stages  # imports torch

    plans = plan_stages(recipe, Assumed(**vars(args)), rates)
    table = Table("stage", "work", title=recipe.name)
    for column in ("GPUs", "memory per GPU", "disk", "hours"):
        table.add_column(column, justify="right")
    for plan in plans:
        hours = plan.hours(rates[plan.stage])
        sizes = size_text(plan.memory_bytes), size_text(plan.disk_bytes)
        table.add_row(plan.stage, plan.work, str(plan.gpus), *sizes, "" if hours is None else f"{hours:,.2f}")
    console = terminal()
    console.print(table)
    for note in dict.fromkeys(note for plan in plans for note in plan.notes if note):  # stages may share one
        console.print(note, highlight=False)


def size_text(num_bytes: int) -> str:
    """In TiB, GiB, MiB and so on."""
    return ByteSize(num_bytes).human_readable(separator=" ")
