"""Optimisers, precisions and trackers, each in a real run that is stopped and resumed."""

import shutil

import pytest
import torch
from safetensors.torch import load_file

from tests.faults.secrets import MARKER, files_with, set_secrets
from tests.training.launching import checkpoints, entries, forget_after, launch, losses, run

pytestmark = pytest.mark.slow


def resumes_exactly(recipe, *options: str, ranks: int) -> None:
    """Stop after step 4, resume: the same losses and the same final weights, to the last bit."""
    undisturbed, final = losses(recipe.run_dir), load_file(checkpoints(recipe.run_dir)[-1] / "model.safetensors")
    forget_after(recipe.run_dir, 4)
    assert "resuming from step 4" in run(recipe, *options, ranks=ranks)
    assert losses(recipe.run_dir) == undisturbed
    again = load_file(checkpoints(recipe.run_dir)[-1] / "model.safetensors")
    assert all(torch.equal(again[name], final[name]) for name in final)


@pytest.mark.long
def test_muon_on_two_ranks_with_tensorboard_learns_and_resumes(fresh_recipe):
    recipe, options = fresh_recipe(), ("train.optimizer=muon", "train.zero_stage=2", "train.batches_per_step=2")
    options = (*options, "train.tracker=tensorboard", "train.keep_checkpoints=3")
    run(recipe, *options, ranks=2)
    steps = entries(recipe.run_dir)
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    (events,) = (recipe.run_dir / "tiny").glob("events.out.tfevents.*")
    content = events.read_bytes()
    assert b"train/loss_per_step/2" in content
    assert b"validation/acceptance_length" in content
    final = load_file(checkpoints(recipe.run_dir)[-1] / "model.safetensors")
    resumes_exactly(recipe, *options, ranks=2)
    whole = fresh_recipe(name="whole")
    run(whole, *options, "train.zero_stage=3", ranks=2)
    resumes_exactly(whole, *options, "train.zero_stage=3", ranks=2)
    for name, tensor in load_file(checkpoints(whole.run_dir)[-1] / "model.safetensors").items():
        torch.testing.assert_close(tensor, final[name], rtol=1e-4, atol=1e-5)
    forget_after(recipe.run_dir, 4)
    refused = launch(recipe, *options, ranks=1)
    assert "was written by 2 ranks and this run has 1" in refused.stderr


def test_bfloat16_with_wandb_learns_and_resumes(fresh_recipe, monkeypatch):
    set_secrets(monkeypatch)
    recipe = fresh_recipe()
    options = ("train.precision=bf16", "train.tracker=wandb", "train.batches_per_step=2")
    options = (*options, "train.keep_checkpoints=3")
    printed = run(recipe, *options)
    assert MARKER not in printed
    assert not files_with(recipe.run_dir, MARKER)
    steps = entries(recipe.run_dir)
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert list((recipe.run_dir / "wandb").glob("offline-run-*/*.wandb"))
    resumes_exactly(recipe, *options, ranks=1)


def test_recomputed_steps_give_the_same_run(fresh_recipe):
    kept, recomputed = fresh_recipe(name="kept"), fresh_recipe(name="recomputed")
    options = ("train.zero_stage=3", "train.batches_per_step=2", "train.precision=bf16")
    run(kept, *options, ranks=2)
    run(recomputed, *options, "train.gradient_checkpointing=true", ranks=2)
    assert losses(recomputed.run_dir) == losses(kept.run_dir)
    # What is exported are the float32 masters, not the bf16 weights that computed.
    weights = load_file(checkpoints(kept.run_dir)[-1] / "model.safetensors")
    rounded = [name for name, t in weights.items() if "_proj" in name and torch.equal(t, t.bfloat16().float())]
    assert not rounded


def test_loss_on_the_heads_own_rounds_learns_and_resumes(finished_run, fresh_recipe):
    recipe = fresh_recipe()
    shutil.copytree(finished_run.run_dir, recipe.run_dir.with_name("start"))
    options = ("train.init_from=runs/start", "train.rejection=true", "train.zero_stage=3")
    options = (*options, "train.batches_per_step=2", "train.keep_checkpoints=3", "train.learning_rate=1e-4")
    run(recipe, *options, ranks=2)
    before, *_, after = (entry["acceptance_length"] for entry in entries(recipe.run_dir, "validation"))
    resumes_exactly(recipe, *options, ranks=2)
    assert after > before
