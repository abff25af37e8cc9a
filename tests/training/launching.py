"""Real runs through `accelerate launch`, as a user starts them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from drafthead import provenance
from drafthead.config import REPO_ROOT, Recipe
from tests.training.conftest import SMALL


def command(recipe: Recipe, *overrides: str, ranks: int = 1, flags: tuple[str, ...] = (), script="train/eagle3.py"):
    several = ("--multi_gpu", "--num_processes", str(ranks)) if ranks > 1 else ("--num_processes", "1")
    return [
        sys.executable, "-m", "accelerate.commands.launch", *several, "--num_machines", "1",
        "--mixed_precision", "no", "--dynamo_backend", "no", *flags,
        script, f"output_dir={recipe.output_dir}", *SMALL, *overrides,
    ]  # fmt: skip


def environment() -> dict[str, str]:
    # A second thread that spins between tiny steps would slow down whatever else runs.
    settings = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "WANDB_MODE": "offline"}
    return {**os.environ, **settings, "PYTHONPATH": str(REPO_ROOT)}


def launch(recipe: Recipe, *overrides: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(recipe, *overrides, **options), cwd=REPO_ROOT, capture_output=True, text=True, check=False,
        timeout=300, env=environment(),
    )  # fmt: skip


def run(recipe: Recipe, *overrides: str, **options) -> str:
    """Launch a run that must succeed; returns what it printed."""
    result = launch(recipe, *overrides, **options)
    assert result.returncode == 0, result.stderr
    return result.stdout


def entries(run_dir: Path, kind: str = "train") -> list[dict]:
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [entry for entry in found if entry["kind"] == kind]


def losses(run_dir: Path) -> list[float]:
    return [entry["loss"] for entry in entries(run_dir)]


def checkpoints(run_dir: Path) -> list[Path]:
    return sorted((run_dir / "checkpoints").glob("step_*"))


def forget_after(run_dir: Path, step: int) -> None:
    """Make a finished run look as if it had been stopped right after the checkpoint of a step."""
    (run_dir / provenance.MANIFEST).unlink()
    for path in checkpoints(run_dir):
        if path.name > f"step_{step:08d}":
            shutil.rmtree(path)
    assert checkpoints(run_dir)[-1].name == f"step_{step:08d}"
