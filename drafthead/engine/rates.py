"""Tokens per second for a plan: measured by the user, measured by this project, or assumed from a GPU's data sheet.

An assumed rate says so wherever it is printed. It is the roofline, of which a share is reached: a prefill multiplies
every active weight twice per token; a step of decoding reads the weights that its tokens use and the cache of its
sequences. Given up: attention's operations, the time between steps, the GPUs' interconnect. The shares are guesses,
typical of large batches; a rate of your own, from the last lines of a small run, replaces them.
"""

from dataclasses import dataclass

from drafthead.config import Recipe
from drafthead.target.size import TargetSize

SHARE = 0.4  # of the operations
BANDWIDTH_SHARE = 0.6


@dataclass(frozen=True)
class Gpu:
    """A data sheet: dense bf16 operations per second, bytes per second, bytes."""

    name: str
    operations: float
    bandwidth: float
    memory: int


GPUS = {
    "a100": Gpu("A100 80 GB", 312e12, 2.0e12, 80 << 30),
    "b200": Gpu("B200", 2250e12, 8.0e12, 180 << 30),
    "h100": Gpu("H100 SXM", 989e12, 3.35e12, 80 << 30),
    "h200": Gpu("H200", 989e12, 4.8e12, 141 << 30),
    "l40s": Gpu("L40S", 362e12, 0.864e12, 48 << 30),
}


@dataclass(frozen=True)
class Rate:
    """Tokens per second of one engine or training run, and where the number comes from."""

    tokens_per_second: float
    source: str

    def __str__(self) -> str:
        return f"{self.tokens_per_second:,.0f} tokens/s ({self.source})"


_HERE = "vLLM 0.32 on 2 CPU cores, 2026-11-21"
# By target.path and stage. Add a line only with a run behind it, of the recipe that ships for the target.
MEASURED: dict[str, dict[str, Rate]] = {
    "data_gen/tiny/target": {
        "regenerate": Rate(1389, f"python data_gen/regenerate.py, {_HERE}, beside other work, 111,673 tokens"),
        "harvest": Rate(5355, f"python data_gen/harvest.py, {_HERE}, 138,417 tokens, start included"),
        "train": Rate(2640, f"python train/eagle3.py, {_HERE}, beside other work, 249 steps in 382 s"),
    },
}


@dataclass(frozen=True)
class Start:
    """Seconds until an engine answers, and where the number comes from."""

    seconds: float
    source: str

    def __str__(self) -> str:
        return f"{self.seconds:.0f} s ({self.source})"


_STARTS = {"data_gen/tiny/target": Start(20, f"a server, {_HERE}")}


def start_seconds(recipe: Recipe) -> Start:
    """How long an engine of this target takes to start."""
    assumption = Start(180, "ASSUMED, not measured: reading large weights, compiling, capturing graphs")
    return _STARTS.get(recipe.target.path, assumption)


def gpu_named(name: str) -> Gpu:
    """A GPU of the list.

    Raises:
        ValueError: it is not on it.
    """
    if name not in GPUS:
        raise ValueError(f"--gpu {name} is not known: {', '.join(sorted(GPUS))}, or pass --tokens-per-second")
    return GPUS[name]


def known_rate(recipe: Recipe, stage: str, given: float | None) -> Rate | None:
    """What the user measured, else what this project did on exactly this target; None: nobody has."""
    if given:
        return Rate(given, "--tokens-per-second")
    return MEASURED.get(recipe.target.path, {}).get(stage)


def assumed(tokens_per_second: float, gpu: Gpu, gpus: int) -> Rate:
    """A rate from a data sheet, marked as such."""
    count = f"{gpus} x " if gpus > 1 else ""
    reached = f"{SHARE:.0%} of the operations, {BANDWIDTH_SHARE:.0%} of the bandwidth"
    return Rate(tokens_per_second, f"ASSUMED, not measured: {reached} on the data sheet of {count}{gpu.name}")


def prefill_rate(size: TargetSize, gpu: Gpu, gpus: int) -> Rate:
    """Tokens per second that one engine on `gpus` GPUs reads."""
    return assumed(SHARE * gpus * gpu.operations / (2 * size.active), gpu, gpus)


def decode_rate(size: TargetSize, gpu: Gpu, gpus: int, batch: int, context: float) -> Rate:
    """Tokens per second that one engine on `gpus` GPUs says to `batch` sequences of `context` tokens."""
    read = size.read_bytes(batch) + batch * size.cache_bytes(context)
    step = max(
        read / (BANDWIDTH_SHARE * gpus * gpu.bandwidth), 2 * size.active * batch / (SHARE * gpus * gpu.operations)
    )
    return assumed(batch / step, gpu, gpus)
