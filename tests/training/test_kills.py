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
EVERY = 4  # train.checkpoint_every


def kill_one_rank(recipe, delay: float, chooser: random.Random) -> bool:
    """Start or resume on two ranks, SIGKILL one of them `delay` seconds later; False if it had finished."""
    with subprocess.Popen(
        command(recipe, *OPTIONS, ranks=2), cwd=REPO_ROOT, env=environment(), start_new_session=True,
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    ) as launcher:  # fmt: skip
        try:
            launcher.wait(timeout=delay)
            return False
        except subprocess.TimeoutExpired:
            children = psutil.Process(launcher.pid).children(recursive=True)
            ranks = [child for child in children if "train/eagle3.py" in child.cmdline()]
        if not ranks:  # killed before the launcher had started them
            launcher.send_signal(signal.SIGKILL)
        else:
            chooser.choice(ranks).kill()
        launcher.wait(timeout=120)
        assert launcher.returncode != 0
    return True


def newest_step(run_dir) -> int:
    return max((int(path.name.removeprefix("step_")) for path in checkpoints(run_dir)), default=0)


def survive(undisturbed, recipe, kills: int, seed: int) -> None:
    """Kill a run again and again, then let it finish: the same losses and weights as the undisturbed one."""
    chooser = random.Random(seed)
    started = time.monotonic()
    run(undisturbed, *OPTIONS, ranks=2)
    duration = time.monotonic() - started
    for _ in range(kills):
        if not kill_one_rank(recipe, chooser.uniform(0.4, 1.0) * duration, chooser):
            break
        done = [e["step"] for e in entries(recipe.run_dir)] if (recipe.run_dir / "metrics.jsonl").exists() else []
        assert newest_step(recipe.run_dir) >= (max(done, default=1) - 1) // EVERY * EVERY
    if not (recipe.run_dir / provenance.MANIFEST).exists():
        run(recipe, *OPTIONS, ranks=2)
    assert losses(recipe.run_dir) == losses(undisturbed.run_dir)  # to the last bit
    final = f"checkpoints/step_{newest_step(undisturbed.run_dir):08d}/model.safetensors"
    assert provenance.sha256_file(recipe.run_dir / final) == provenance.sha256_file(undisturbed.run_dir / final)


@pytest.mark.slow
def test_a_run_survives_the_sigkill_of_a_rank(fresh_recipe):
    seed = time.time_ns()
    print(f"seed {seed}")  # shown when the test fails
    survive(fresh_recipe(name="undisturbed"), fresh_recipe(name="killed"), kills=1, seed=seed)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_run_survives_ten_kills(fresh_recipe):
    seed = time.time_ns()
    print(f"seed {seed}")
    survive(fresh_recipe(name="undisturbed"), fresh_recipe(name="killed"), kills=10, seed=seed)
