"""Optimisers, averages, precisions and trackers, each in a real run that is stopped and resumed."""

import pytest
import torch
from safetensors.torch import load_file

from drafthead.config import load_recipe
from drafthead.training.optimizer import build_optimizer, rate_share, schedule
from tests.faults.secrets import MARKER, files_with, set_secrets
from tests.training.launching import checkpoints, entries, forget_after, launch, losses, run


def resumes_exactly(recipe, *options: str, ranks: int) -> None:
    """Stop after step 4, resume: the same losses and the same final weights, to the last bit."""
    undisturbed, final = losses(recipe.run_dir), load_file(checkpoints(recipe.run_dir)[-1] / "model.safetensors")
    forget_after(recipe.run_dir, 4)
    assert "resuming from step 4" in run(recipe, *options, ranks=ranks)
    assert losses(recipe.run_dir) == undisturbed
    again = load_file(checkpoints(recipe.run_dir)[-1] / "model.safetensors")
    assert all(torch.equal(again[name], final[name]) for name in final)


@pytest.mark.slow
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
    resumes_exactly(recipe, *options, ranks=2)
    forget_after(recipe.run_dir, 4)
    refused = launch(recipe, *options, ranks=1)
    assert "was written by 2 ranks and this run has 1" in refused.stderr


@pytest.mark.slow
def test_bfloat16_with_averaged_weights_and_wandb_learns_and_resumes(fresh_recipe, monkeypatch):
    set_secrets(monkeypatch)
    recipe = fresh_recipe()
    options = ("train.precision=bf16", "train.ema_decay=0.9", "train.tracker=wandb", "train.batches_per_step=2")
    options = (*options, "train.keep_checkpoints=3")
    printed = run(recipe, *options)
    assert MARKER not in printed
    assert not files_with(recipe.run_dir, MARKER)
    steps = entries(recipe.run_dir)
    assert steps[-1]["loss"] < 0.5 * steps[0]["loss"]
    assert list((recipe.run_dir / "wandb").glob("offline-run-*/*.wandb"))
    resumes_exactly(recipe, *options, ranks=1)


@pytest.mark.slow
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


def adamw(**train) -> tuple:
    config = load_recipe(overrides=[f"train.{key}={value}" for key, value in train.items()]).train
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    return config, model, build_optimizer(config, model)


def test_the_average_follows_its_definition():
    config, model, optimizer = adamw(ema_decay=0.8)
    average, total = None, 6
    for step in range(total):
        schedule(optimizer, config, step, total)
        model(torch.ones(1, 3)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        decay = min(0.8, (1 + step) / (10 + step))
        weight = model.weight.detach().clone()
        average = weight if average is None else decay * average + (1 - decay) * weight
    torch.testing.assert_close(optimizer.state[model.weight]["ema"], average)


def test_without_an_average_the_optimiser_is_plain_adamw():
    config, model, optimizer = adamw(zero_stage=1)
    twin = torch.nn.Linear(3, 2)
    twin.load_state_dict(model.state_dict())
    plain = torch.optim.AdamW(twin.parameters(), lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    for _ in range(3):
        for network, update in ((model, optimizer), (twin, plain)):
            network(torch.ones(1, 3)).square().sum().backward()
            update.step()
            update.zero_grad()
    assert torch.equal(model.weight, twin.weight)


def test_the_rate_warms_up_and_falls_to_a_tenth():
    shares = [rate_share(0.1, step, 100) for step in range(100)]
    assert shares[0] == pytest.approx(0.1)
    assert shares[9] == shares[10] == 1.0
    assert shares[10:] == sorted(shares[10:], reverse=True)
    assert shares[99] == pytest.approx(0.1, abs=1e-3)


def test_at_zero_0_a_gradient_that_is_not_finite_changes_nothing():
    _, model, optimizer = adamw(zero_stage=0, precision="fp32")
    before = model.weight.detach().clone()
    (model(torch.ones(1, 3)) * torch.tensor([1.0, float("inf")])).sum().backward()
    optimizer.step()
    assert torch.equal(model.weight, before)
    assert not torch.isfinite(optimizer.grad_norm)
