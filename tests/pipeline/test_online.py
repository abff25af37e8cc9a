"""Online training with real vLLM on one side and real DeepSpeed on the other, both killed on the way.

The spool holds two epochs, so half of it holds one and the order of training is that of a whole store: the losses
must be those of ordinary training on the ordinary store, to the last bit.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from drafthead import provenance
from drafthead.config import REPO_ROOT, Recipe, load_recipe
from drafthead.data.spool import Spool, open_spool
from drafthead.generation import fill
from drafthead.generation.harvest import harvest
from drafthead.generation.prompts import make_prompts
from drafthead.generation.regenerate import regenerate
from tests.pipeline.conftest import ACCELERATE

pytestmark = pytest.mark.slow

SMALL = (
    "prompts.max_train=24", "prompts.max_heldout=4", "prompts.validation=4", "responses.max_tokens=48",
    "eval.max_tokens=48", "states.sequences_per_shard=8", "head.intermediate_size=64", "train.num_ttt_steps=3",
    "train.epochs=4", "train.tokens_per_batch=512", "train.checkpoint_every=1000",
)  # fmt: skip
SPOOL = "states.spool_shards=6"  # three shards an epoch
HARVEST, TRAIN = ("data_gen/harvest.py",), (*ACCELERATE, "train/eagle3.py")


def command(script: tuple[str, ...], root: Path, *overrides: str) -> list[str]:
    return [sys.executable, *script, f"output_dir={root}", *SMALL, *overrides]


class Side:
    """Harvester or trainer: a process group with a log, so that a kill leaves no worker behind."""

    def __init__(self, script: tuple[str, ...], root: Path):
        self._command, self._log = command(script, root, SPOOL), root / f"{Path(script[-1]).stem}.log"
        self.start()

    def start(self) -> None:
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                self._command, cwd=REPO_ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=log, stderr=log,
                start_new_session=True,
            )  # fmt: skip

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    @property
    def said(self) -> str:
        return self._log.read_text()


@contextmanager
def watched(spool: Spool) -> Iterator[list[int]]:
    """How many shards lie in the spool, finished or being written, looked up all the time."""
    counts, end = [0], threading.Event()

    def watch() -> None:
        while not end.wait(0.005):
            counts.append(len([name for name in os.listdir(spool.directory) if "shard-" in name]))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield counts
    finally:
        end.set()
        thread.join()


def until(condition: Callable[[], bool], *sides: Side) -> None:
    deadline = time.monotonic() + 150
    while not condition():
        assert time.monotonic() < deadline, "\n".join(side.said[-3000:] for side in sides)
        time.sleep(0.01)


def steps_and_losses(recipe: Recipe) -> list[tuple[int, float]]:
    path = recipe.run_dir / "metrics.jsonl"
    entries = [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return [(entry["step"], entry["loss"]) for entry in entries if entry["kind"] == "train"]


@pytest.fixture(scope="module")
def answered(tmp_path_factory) -> Path:
    """A root with prompts and responses."""
    root = tmp_path_factory.mktemp("answered")
    recipe = load_recipe(overrides=[f"output_dir={root}", *SMALL])
    make_prompts(recipe)
    regenerate(recipe)
    return root


def beside(root: Path, target: Path, *overrides: str) -> Recipe:
    """A recipe with states and runs of its own over the same prompts and responses."""
    recipe = load_recipe(overrides=[f"output_dir={target}", *SMALL, *overrides])
    recipe.prompts_dir.parent.mkdir(parents=True)
    for name in ("prompts", "responses"):
        recipe.prompts_dir.with_name(name).symlink_to(root / "data" / recipe.name / name)
    return recipe


@pytest.fixture(scope="module")
def ordinary(answered, tmp_path_factory) -> Recipe:
    """Harvested to the end, then trained: what online training is compared with."""
    root = tmp_path_factory.mktemp("ordinary")
    recipe = beside(answered, root)
    for script in (HARVEST, TRAIN):
        result = subprocess.run(
            command(script, root), cwd=REPO_ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True,
            text=True, check=False,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr[-3000:]
    return recipe


def test_killed_on_both_sides_it_ends_with_the_losses_of_ordinary_training(answered, ordinary, tmp_path, monkeypatch):
    recipe = beside(answered, tmp_path, SPOOL)
    spool = open_spool(recipe, 24)
    spool.directory.mkdir(parents=True)
    with watched(spool) as counts:
        trainer, harvester = Side(TRAIN, tmp_path), Side(HARVEST, tmp_path)
        try:
            # Past a checkpoint, in the middle of what it does not cover.
            until(lambda: spool.first_needed() >= 3, trainer, harvester)
            saved = len(steps_and_losses(recipe))
            until(lambda: len(steps_and_losses(recipe)) >= saved + 2, trainer, harvester)
            trainer.kill()
            trainer.start()
            # Room again, so it is at work.
            until(lambda: spool.first_needed() >= 6, trainer, harvester)
            harvester.kill()
            assert not (spool.directory / provenance.MANIFEST).exists()
            assert not (recipe.run_dir / provenance.MANIFEST).exists()
            harvester.start()
            for side in (trainer, harvester):
                assert side.process.wait(timeout=150) == 0, side.said[-3000:]
        finally:
            trainer.kill()
            harvester.kill()

    assert steps_and_losses(recipe) == steps_and_losses(ordinary)  # to the last bit
    assert max(counts) == 6
    assert (spool.present(), spool.first_needed()) == (set(), 12)
    assert "resuming from step" in trainer.said
    assert "waiting for the harvester to write" in trainer.said
    assert "if it is not running: python data_gen/harvest.py RECIPE" in trainer.said
    assert "waiting for training to use up a shard" in harvester.said

    # Both have nothing left to do, and the directory is not taken for another kind.
    monkeypatch.setattr(fill, "fill", None)
    harvest(recipe)
    with pytest.raises(provenance.ArtefactError, match=r"spool_shards: found 6, wanted None"):
        harvest(beside(answered, tmp_path / "whole").model_copy(update={"output_dir": str(tmp_path)}))
    with pytest.raises(provenance.ArtefactError, match=r"spool_shards: found None, wanted 6"):
        harvest(recipe.model_copy(update={"output_dir": ordinary.output_dir}))
