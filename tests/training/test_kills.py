"""SIGKILL of a rank at a random moment costs at most the steps since the last checkpoint."""

import random
import signal
import subprocess
import time

import psutil
import pytest

from drafthead import provenance
from drafthead.config import REPO_ROOT
from tests.training.launching import checkpoints, command, entries, environment, losses, run

OPTIONS = ("train.batches_per_step=2", "train.zero_stage=2")


def kill_one_rank(recipe, options, chooser: random.Random, seconds: float) -> bool:
    """Start or resume on two ranks and SIGKILL one of them; False if the run was over before.

    One kill in four hits anywhere in the start, the others up to `seconds` after the first new step.
    """
    before, during_start = len(steps_done(recipe.run_dir)), chooser.random() < 0.25
    with subprocess.Popen(
        command(recipe, *options, ranks=2), cwd=REPO_ROOT, env=environment(), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as launcher:  # fmt: skip
        if during_start:
            time.sleep(chooser.uniform(0, 10))
        else:
            while launcher.poll() is None and len(steps_done(recipe.run_dir)) <= before:
                time.sleep(0.02)
                before = min(before, len(steps_done(recipe.run_dir)))  # a resumed run drops what it repeats
            time.sleep(chooser.uniform(0, seconds))
        if launcher.poll() is not None:
            return False
        children = psutil.Process(launcher.pid).children(recursive=True)
        ranks = [child for child in children if "train/eagle3.py" in child.cmdline()]
        if ranks:
            chooser.choice(ranks).kill()
        else:  # the launcher had not started them yet
            launcher.send_signal(signal.SIGKILL)
        launcher.wait(timeout=120)
        return launcher.returncode != 0


def steps_done(run_dir) -> list[int]:
    path = run_dir / "metrics.jsonl"
    return [e["step"] for e in entries(run_dir)] if path.exists() else []


def newest_step(run_dir) -> int:
    return max((int(path.name.removeprefix("step_")) for path in checkpoints(run_dir)), default=0)


def survive(undisturbed, recipe, options, every: int, kills: int) -> int:
    """Kill a run again and again, then let it finish: the same losses and weights as the undisturbed one.

    Returns:
        How many kills hit a run that was not over.
    """
    seed = time.time_ns()
    print(f"seed {seed}")  # shown when the test fails
    chooser, hits = random.Random(seed), 0
    run(undisturbed, *options, ranks=2)
    while hits < kills and not (recipe.run_dir / provenance.MANIFEST).exists():
        hits += kill_one_rank(recipe, options, chooser, seconds=1.0)
        done = max(steps_done(recipe.run_dir), default=1)
        assert newest_step(recipe.run_dir) >= (done - 1) // every * every  # lost: at most what no checkpoint holds
        print(f"kill {hits}: {done} steps done, checkpoint {newest_step(recipe.run_dir)}")
    run(recipe, *options, ranks=2)
    assert losses(recipe.run_dir) == losses(undisturbed.run_dir)  # to the last bit
    final = f"checkpoints/step_{newest_step(undisturbed.run_dir):08d}/model.safetensors"
    assert provenance.sha256_file(recipe.run_dir / final) == provenance.sha256_file(undisturbed.run_dir / final)
    return hits


@pytest.mark.slow
def test_a_run_survives_the_sigkill_of_a_rank(fresh_recipe):
    undisturbed, killed = fresh_recipe(name="undisturbed"), fresh_recipe(name="killed")
    options = (*OPTIONS, "train.epochs=3")  # long enough to be hit
    assert survive(undisturbed, killed, options, every=4, kills=1) == 1


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_run_survives_ten_kills(fresh_recipe):
    undisturbed, killed = fresh_recipe(name="undisturbed"), fresh_recipe(name="killed")
    long = (*OPTIONS, "train.epochs=30", "train.checkpoint_every=10")
    assert survive(undisturbed, killed, long, every=10, kills=10) == 10
