"""Online training with real vLLM on one side and real DeepSpeed on the other, both killed on the way.

The spool holds two epochs, so half of it holds one and the order of training is that of a whole store: the losses
must be those of ordinary training on the ordinary store, to the last bit.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from drafthead import artifacts
from drafthead.data.spool import Spool, open_spool
from drafthead.generation import harvest as stage
from drafthead.generation.harvest import harvest
from drafthead.generation.prompts import make_prompts
from drafthead.generation.regenerate import regenerate
from tests.faults.stages import newest_checkpoint, steps_done
from tests.recipes import tiny_recipe
from tests.scripts import accelerate, wait_for
from tests.training.launching import losses
from tests.warm import warm

pytestmark = pytest.mark.slow

SMALL = (
    "prompts.max_train=24", "prompts.max_heldout=4", "prompts.validation=4", "responses.max_tokens=48",
    "eval.max_tokens=48", "states.sequences_per_shard=8", "states.prompt_loss=0.5", "head.intermediate_size=64",
    "head.num_ttt_steps=3", "train.epochs=4", "train.tokens_per_batch=512", "train.checkpoint_every=1000",
)  # fmt: skip
SPOOL = "states.spool_shards=6"  # three shards an epoch
HARVEST, TRAIN = ("data_gen/harvest.py",), (*accelerate(), "train/eagle3.py")


def begin(script: tuple[str, ...], root: Path, *overrides: str) -> psutil.Popen:
    """Harvester or trainer, in a process group of its own, with a log beside its outputs."""
    log = root / f"{Path(script[-1]).stem}.log"
    return warm().start(*script, f"output_dir={root}", *SMALL, *overrides, log=log)


def kill(process: psutil.Popen) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@contextmanager
def watched(spool: Spool) -> Iterator[list[int]]:
    """How many shards lie in the spool, finished or being written, looked up all the time."""
    counts, end = [0], threading.Event()

    def watch() -> None:
        while not end.wait(0.005):
            counts.append(len([name for name in os.listdir(spool.directory) if "safetensors" in name]))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield counts
    finally:
        end.set()
        thread.join()


@pytest.mark.soak
def test_killed_on_both_sides_it_ends_with_the_losses_of_ordinary_training(tmp_path, monkeypatch):
    ordinary, root = tiny_recipe(tmp_path / "ordinary", *SMALL), tmp_path / "online"
    make_prompts(ordinary)
    regenerate(ordinary)
    harvest(ordinary)
    recipe = tiny_recipe(root, *SMALL, SPOOL)
    recipe.prompts_dir.parent.mkdir(parents=True)
    for name in ("prompts", "responses"):
        recipe.prompts_dir.with_name(name).symlink_to(ordinary.prompts_dir.with_name(name))
    spool, trained, logs = open_spool(recipe, 24), root / "eagle3.log", root / "*.log"
    spool.directory.mkdir(parents=True)
    with watched(spool) as counts:
        trainer, harvester = sides = [begin(script, root, SPOOL) for script in (TRAIN, HARVEST)]
        try:
            # The next half is there, so that training can go on alone, and there is room again: the harvester works.
            wait_for(lambda: spool.first_needed() >= 3 and {3, 4, 5} <= spool.present(), logs, *sides)
            kill(harvester)
            saved = newest_checkpoint(recipe.run_dir)
            wait_for(lambda: steps_done(recipe.run_dir) >= saved + 2, logs, trainer)
            kill(trainer)  # in the middle of what no checkpoint covers
            assert spool.first_needed() == 3

            sides = [begin(TRAIN, root, SPOOL), begin(TRAIN, tmp_path / "ordinary")]
            wait_for(lambda: "python data_gen/harvest.py RECIPE" in trained.read_text(), logs, sides[0])
            assert spool.first_needed() > 3, "waiting, it keeps what is trained, so that there is room to go on"
            for directory in (spool.directory, recipe.run_dir):
                assert not (directory / artifacts.MANIFEST).exists()
            sides.append(begin(HARVEST, root, SPOOL))
            assert [side.wait(600) for side in sides] == [0, 0, 0], trained.read_text()[-3000:]
        finally:
            for side in sides:
                kill(side)

    assert losses(recipe.run_dir) == losses(ordinary.run_dir)  # to the last bit
    assert steps_done(recipe.run_dir) == steps_done(ordinary.run_dir)
    assert max(counts) == 6
    assert (spool.present(), spool.first_needed()) == (set(), 12)
    assert "resuming from step" in trained.read_text()

    # Both have nothing left to do, and the directory is not taken for one of the other kind.
    monkeypatch.setattr(stage, "fill", None)
    harvest(recipe)
    with pytest.raises(artifacts.ArtifactError, match=r"spool_shards: found 6, wanted None"):
        harvest(ordinary.model_copy(update={"output_dir": recipe.output_dir}))
    with pytest.raises(artifacts.ArtifactError, match=r"spool_shards: found None, wanted 6"):
        harvest(recipe.model_copy(update={"output_dir": ordinary.output_dir}))
