"""Real runs of the training recipe: by forks of a process that has the libraries, or through `accelerate launch`."""

import json
import shutil
import subprocess
from pathlib import Path

from drafthead import artifacts
from drafthead.config import Recipe
from tests.scripts import accelerate
from tests.training.synthetic import SMALL
from tests.warm import warm

SCRIPT = "train/eagle3.py"


def command(recipe: Recipe, *overrides: str, flags: tuple[str, ...] = ()) -> list[str]:
    """Arguments of Python for a run through accelerate's launcher; later flags win."""
    return [*accelerate(), *flags, SCRIPT, f"output_dir={recipe.output_dir}", *SMALL, *overrides]


def launch(recipe: Recipe, *overrides: str, ranks: int = 1, script=SCRIPT) -> subprocess.CompletedProcess:
    """The ranks of a run as accelerate's launcher would start them, without importing everything again."""
    return warm().run(script, f"output_dir={recipe.output_dir}", *SMALL, *overrides, ranks=ranks)


def run(recipe: Recipe, *overrides: str, **options) -> str:
    """Launch a run that must succeed; returns what it printed."""
    result = launch(recipe, *overrides, **options)
    assert result.returncode == 0, f"{overrides}\n{result.stdout[-3000:]}\n{result.stderr[-5000:]}"
    return result.stdout


def entries(run_dir: Path, kind: str = "train") -> list[dict]:
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [entry for entry in lines if entry["kind"] == kind]


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
