"""Real runs through `accelerate launch`, as a user starts them."""

import json
import shutil
import subprocess
from pathlib import Path

from drafthead import artifacts
from drafthead.config import Recipe
from tests.scripts import accelerate, run_ok, run_python
from tests.training.synthetic import SMALL


def command(recipe: Recipe, *overrides: str, ranks: int = 1, flags: tuple[str, ...] = (), script="train/eagle3.py"):
    """Arguments of Python; later flags of the launcher win."""
    return [*accelerate(ranks), *flags, script, f"output_dir={recipe.output_dir}", *SMALL, *overrides]


def launch(recipe: Recipe, *overrides: str, **options) -> subprocess.CompletedProcess:
    return run_python(*command(recipe, *overrides, **options), timeout_s=300)


def run(recipe: Recipe, *overrides: str, **options) -> str:
    """Launch a run that must succeed; returns what it printed."""
    return run_ok(*command(recipe, *overrides, **options), timeout_s=300)


def entries(run_dir: Path, kind: str = "train") -> list[dict]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [entry for entry in found if entry["kind"] == kind]


def losses(run_dir: Path) -> list[float]:
    return [entry["loss"] for entry in entries(run_dir)]


def checkpoints(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("step_*"))


def forget_after(run_dir: Path, step: int) -> None:
    """Make a finished run look as if it had been stopped right after the checkpoint of a step."""
    (run_dir / artifacts.MANIFEST).unlink()
    for path in checkpoints(run_dir):
        if path.name > f"step_{step:08d}":
            shutil.rmtree(path)
    assert checkpoints(run_dir)[-1].name == f"step_{step:08d}"
