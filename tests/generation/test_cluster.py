"""One store from many workers: the same as the one of a single process, also when a worker dies on the way."""

import os
import shutil
import signal
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from queue import Queue

import psutil
import pytest
from tqdm import tqdm

from drafthead.artifacts import ArtifactError, read_json
from drafthead.config import Recipe, load_recipe
from drafthead.data.responses import SPLITS
from drafthead.data.shard import shard_path, write_shard
from drafthead.data.store import verify_store
from drafthead.engine import running
from drafthead.generation.harvest import harvest
from drafthead.generation.shards import ShardJob, to_do
from tests.artifacts import read_responses, response
from tests.damage import flip_bit
from tests.data.sequences import sequence
from tests.generation.small import SMALL, copy_of, never, small_recipe
from tests.scripts import start, wait_for
from tests.warm import run_warm

RAY_OF_ITS_OWN = {"RAY_ADDRESS": "local"}  # whatever else runs on this machine


def copy_for(regenerated: Recipe, directory: Path) -> tuple[Recipe, list[str]]:
    """The same responses to be harvested, one to a shard, and the overrides that say so on a command line."""
    recipe = copy_of(regenerated, directory, sequences_per_shard=1)
    return recipe, [f"output_dir={directory}", *SMALL, "states.sequences_per_shard=1"]


def checksums(recipe: Recipe) -> list[dict]:
    """SHA-256 and size of every shard of both finished splits, which are whole and hold nothing else."""
    for split in SPLITS:
        assert verify_store(recipe.states_dir(split)) == []
        assert not list(recipe.states_dir(split).glob(".*"))
    return [read_json(recipe.states_dir(split) / "manifest.json")["files"] for split in SPLITS]


def busy_engines(driver: psutil.Process) -> Iterator[int]:
    """Process ids of the engines that Ray runs for a driver."""
    for process in driver.children(recursive=True):
        try:
            if process.cmdline()[0].startswith("ray::run_ray_engine"):  # Ray writes its state there
                yield process.pid
        except (psutil.Error, IndexError):
            continue  # it has just ended


def lose_a_worker(script: str, overrides: list[str], files: Path, log: Path) -> str:
    """Run a stage on a cluster with two engines and kill one that is at work once one of 12 files is written.

    Args:
        script: script of the stage.
        overrides: overrides of the recipe.
        files: directory of the output files, and the pattern of their names.
        log: path for the output of the stage, which is returned.
    """
    command = (script, "--cluster", "--workers", "2", *overrides)
    with log.open("w") as file:
        driver = start(*command, variables=RAY_OF_ITS_OWN, stdout=file, stderr=file)
    try:
        wait_for(lambda: list(files.parent.glob(files.name)), log, driver)
        os.kill(next(busy_engines(psutil.Process(driver.pid))), signal.SIGKILL)
        assert len(list(files.parent.glob(files.name))) < 12, "it was to die in the middle"
        assert driver.wait(timeout=1200) == 0, log.read_text()[-3000:]
    finally:
        driver.kill()
    return log.read_text()


@pytest.mark.slow
@pytest.mark.soak
def test_a_ray_cluster_that_loses_a_worker_makes_the_same_store(regenerated: Recipe, tmp_path: Path):
    alone, _ = copy_for(regenerated, tmp_path / "undisturbed")
    harvest(alone)
    recipe, overrides = copy_for(regenerated, tmp_path / "cluster")
    shards = recipe.states_dir("train") / "shard-*"
    output = lose_a_worker("data_gen/harvest.py", overrides, shards, tmp_path / "log")
    assert checksums(recipe) == checksums(alone)
    assert "12 sequences" in output


@pytest.mark.slow
@pytest.mark.long
def test_two_engines_of_this_machine_make_the_same_responses(regenerated: Recipe, tmp_path: Path):
    recipe = regenerated.model_copy(update={"output_dir": str(tmp_path)})
    shutil.copytree(regenerated.prompts_dir, recipe.prompts_dir)
    run_warm("data_gen/regenerate.py", "--workers", "2", f"output_dir={tmp_path}", *SMALL)
    for split in SPLITS:
        assert read_responses(recipe.responses_dir(split)) == read_responses(regenerated.responses_dir(split))


def test_every_engine_gets_gpus_of_its_own(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert (running.node_engines(1), running.node_engines(2), running.node_engines(3)) == (8, 4, 2)
    assert running._devices(2, 4) == ["0,1", "2,3", "4,5", "6,7"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3,2,1,0")
    assert running._devices(3, 2) == ["7,6,5", "4,3,2"]
    with pytest.raises(ValueError, match="--workers 5 of 2 GPUs"):
        running._devices(2, 5)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert (running.node_engines(4), running._devices(1, 2)) == (1, [None, None])


def test_engines_without_gpus_share_the_cores_unless_the_user_says_how_many(monkeypatch):
    for name in ("CUDA_VISIBLE_DEVICES", "VLLM_ENABLE_V1_MULTIPROCESSING"):
        monkeypatch.setenv(name, "0")  # put back, whatever an engine sets
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    threads: list[int] = []
    monkeypatch.setattr("torch.get_num_threads", lambda: 8)
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    task = running.Task(nullcontext, 1, "testing", "seq")
    for devices, engines in ((None, 3), (None, 9), ("0", 3)):
        running.run_engine(task, Queue().get_nowait, devices=devices, engines=engines)
    assert threads == [2, 1]
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    running.run_engine(task, Queue().get_nowait, engines=3)
    assert threads == [2, 1]


class Dying:
    """A worker that dies, or raises, over the second job, once the bar has moved."""

    def __init__(self, how: str, moved: Path):
        self.how, self.moved = how, moved

    def make(self, job, bar) -> None:
        bar.update(1)
        until = time.monotonic() + 60
        while not self.moved.exists():
            assert time.monotonic() < until, "the bar waits for files"
            time.sleep(0.02)
        if job.path.stem != "shard-00001":
            time.sleep(0.5)
            job.path.write_text("whole")
        elif self.how == "raises":
            raise ValueError("states are wrong")
        else:
            os._exit(3)

    def finish(self) -> None:
        pass


@pytest.mark.parametrize(("how", "message"), [("raises", "states are wrong"), ("dies", "Run the same command again")])
def test_what_ends_one_engine_of_this_machine_ends_the_stage_after_the_others(
    tmp_path: Path, monkeypatch, caplog, how, message
):
    jobs, moved = [ShardJob(shard_path(tmp_path, index), []) for index in range(3)], tmp_path / "moved"
    monkeypatch.setattr(tqdm, "update", lambda bar, n: n and moved.touch())
    monkeypatch.setattr(running, "LOOK_EVERY", 0.2)
    with pytest.raises(ValueError, match=message):
        running.run_on_node(running.Task(partial(nullcontext, Dying(how, moved)), 1, "testing", "seq"), jobs, workers=2)
    assert running.unwritten(jobs) == jobs[1:2], "the other engine has finished"
    assert "1 others go on" in caplog.text


def test_no_engine_at_all_is_refused():
    with pytest.raises(ValueError, match="--workers 0"):
        running.runner(Namespace(cluster=False, workers=0), load_recipe())


@pytest.mark.slow
@pytest.mark.soak
def test_a_ray_cluster_that_loses_a_worker_makes_the_same_responses(regenerated: Recipe, tmp_path: Path):
    shutil.copytree(regenerated.prompts_dir, tmp_path / "data" / regenerated.name / "prompts")
    recipe = regenerated.model_copy(update={"output_dir": str(tmp_path)})
    overrides = [f"output_dir={tmp_path}", *SMALL, "responses.prompts_per_part=1"]
    parts = recipe.responses_dir("train") / "part-*"
    lose_a_worker("data_gen/regenerate.py", overrides, parts, tmp_path / "log")
    for split in SPLITS:
        assert read_responses(recipe.responses_dir(split)) == read_responses(regenerated.responses_dir(split))


def test_a_command_is_one_harvester_of_a_spool(tmp_path):
    with pytest.raises(ValueError, match="states.spool_shards 4"):
        harvest(small_recipe(tmp_path, "states.spool_shards=4"), never)


@pytest.mark.parametrize("damage", [flip_bit, lambda path: shutil.copy(shard_path(path.parent, 0), path)])
def test_a_shard_that_was_changed_is_not_skipped(tmp_path: Path, damage: Callable[[Path], object]):
    jobs = [ShardJob(shard_path(tmp_path, index), [response(f"{index}", 2, 7)]) for index in range(3)]
    for index, job in enumerate(jobs[:2]):
        write_shard(job.path, [sequence(f"{index}", 9)], num_target_layers=5)
    assert to_do(jobs) == jobs[2:]
    damage(jobs[1].path)
    with pytest.raises(ArtifactError, match="shard-00001.safetensors"):
        to_do(jobs)
