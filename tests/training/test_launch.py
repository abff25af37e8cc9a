"""Training through `accelerate launch` with real DeepSpeed: ranks, stages, kills and refusals."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.torch import load_file

from drafthead import provenance
from drafthead.config import REPO_ROOT
from drafthead.exporting.head import export_head
from tests.training.conftest import SMALL, small_recipe, synthetic_store

pytestmark = pytest.mark.slow


def command(recipe, *overrides: str, ranks: int = 1, launch: tuple[str, ...] = ()) -> list[str]:
    several = ("--multi_gpu", "--num_processes", str(ranks)) if ranks > 1 else ("--num_processes", "1")
    return [
        sys.executable, "-m", "accelerate.commands.launch", *several, "--num_machines", "1",
        "--mixed_precision", "no", "--dynamo_backend", "no", *launch,
        "train/eagle3.py", f"output_dir={recipe.output_dir}", *SMALL, *overrides,
    ]  # fmt: skip


def launch(recipe, *overrides: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(
        command(recipe, *overrides, **options), cwd=REPO_ROOT, capture_output=True, text=True, check=False, timeout=300,
        env=environment(),
    )  # fmt: skip


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "WANDB_MODE": "offline"}


def train_entries(run_dir: Path) -> list[dict]:
    entries = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [e for e in entries if e["kind"] == "train"]


def losses(run_dir: Path) -> list[float]:
    return [entry["loss"] for entry in train_entries(run_dir)]


@pytest.fixture(scope="module")
def finished(synthetic_data, tmp_path_factory):
    """One undisturbed run that the others are compared with."""
    root = tmp_path_factory.mktemp("finished")
    (root / "data").symlink_to(synthetic_data / "data")
    recipe = small_recipe(root)
    result = launch(recipe)
    assert result.returncode == 0, result.stderr
    return recipe


def test_a_run_learns_and_says_so(finished):
    entries = train_entries(finished.run_dir)
    manifest = provenance.require(finished.run_dir, "run", "train")
    assert [e["step"] for e in entries] == list(range(1, manifest["counts"]["total_steps"] + 1))
    assert entries[-1]["loss"] < 0.5 * entries[0]["loss"]
    assert manifest["counts"]["best_acceptance_length"] > 2
    checkpoints = sorted(p.name for p in (finished.run_dir / "checkpoints").iterdir())
    assert len(checkpoints) <= 3  # two newest and the best


def test_a_finished_run_is_not_repeated(finished):
    result = launch(finished)
    assert result.returncode == 0
    assert "is complete; nothing to do" in result.stdout


def test_the_finished_run_exports(finished):
    directory = export_head(finished)
    weights, config = load_file(directory / "model.safetensors"), json.loads((directory / "config.json").read_text())
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 8]
    assert weights["fc.weight"].shape == (192, 3 * 192)
    assert weights["d2t"].shape == (256,)
    assert {str(t.dtype) for n, t in weights.items() if n not in ("d2t", "t2d")} == {"torch.bfloat16"}


def test_killed_at_any_moment_a_run_ends_with_the_same_losses(finished, fresh_recipe):
    recipe = fresh_recipe()
    with subprocess.Popen(
        command(recipe), cwd=REPO_ROOT, env=environment(), start_new_session=True, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        deadline = time.monotonic() + 120
        while not any((recipe.run_dir / "checkpoints").glob("step_*")) and time.monotonic() < deadline:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)  # the launcher alone would leave its workers alive
    assert not (recipe.run_dir / provenance.MANIFEST).exists()
    result = launch(recipe)
    assert result.returncode == 0, result.stderr
    assert "resuming from step" in result.stdout
    assert losses(recipe.run_dir) == losses(finished.run_dir)  # to the last bit
    final = "checkpoints/step_00000019/model.safetensors"
    assert provenance.sha256_file(recipe.run_dir / final) == provenance.sha256_file(finished.run_dir / final)


def test_two_ranks_and_accumulation_give_the_same_steps(fresh_recipe):
    two_ranks = fresh_recipe(name="ranks")
    result = launch(two_ranks, "train.zero_stage=2", ranks=2)
    assert result.returncode == 0, result.stderr
    accumulated = fresh_recipe(name="accumulated")
    result = launch(accumulated, "train.zero_stage=3", "train.gradient_accumulation_steps=2")
    assert result.returncode == 0, result.stderr
    for one, other in zip(train_entries(two_ranks.run_dir), train_entries(accumulated.run_dir), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_a_damaged_checkpoint_is_passed_over(fresh_recipe):
    recipe = fresh_recipe()
    assert launch(recipe).returncode == 0
    before = losses(recipe.run_dir)
    (recipe.run_dir / provenance.MANIFEST).unlink()
    newest = sorted((recipe.run_dir / "checkpoints").glob("step_*"))[-1]
    victim = next(newest.rglob("*optim_states.pt"))
    content = bytearray(victim.read_bytes())
    content[1000:5096] = bytes(4096)  # loads without an error in DeepSpeed
    victim.write_bytes(content)
    result = launch(recipe)
    assert result.returncode == 0, result.stderr
    assert f"checkpoint {newest.name} is damaged" in result.stdout
    assert losses(recipe.run_dir) == before


@pytest.mark.parametrize(
    ("flags", "ranks", "message"),
    [(("--cpu",), 1, "bypass DeepSpeed"), (("--num_processes", "2"), 1, "asked for several processes and started one")],
)
def test_silent_failures_of_the_launcher_are_refused(fresh_recipe, flags, ranks, message):
    result = launch(fresh_recipe(), ranks=ranks, launch=flags)
    assert result.returncode != 0
    assert message in result.stderr


def test_a_state_that_is_not_finite_stops_the_run_and_is_named(tmp_path):
    recipe = small_recipe(tmp_path)
    synthetic_store(recipe, "train", 60, seed=0, poisoned=40)
    synthetic_store(recipe, "validation", 6, seed=1)
    result = launch(recipe)
    assert result.returncode != 0
    (record,) = recipe.run_dir.glob("nonfinite_step_*.json")
    assert "train0040" in provenance.read_json(record)["ids"]
    assert f"sequences are listed in {record}" in result.stderr
    assert not (recipe.run_dir / provenance.MANIFEST).exists()


def test_another_configuration_does_not_overwrite_a_run(finished):
    result = launch(finished, "train.learning_rate=0.5")
    assert result.returncode != 0
    assert "train.learning_rate: found 0.003, wanted 0.5" in result.stderr
    assert losses(finished.run_dir)
