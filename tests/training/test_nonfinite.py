"""A loss or gradient that is not finite stops the run before it reaches the weights."""

import pytest
import torch
from safetensors.torch import load_file

from drafthead import artifacts
from tests.training.launching import entries, launch, run
from tests.training.synthetic import small_recipe, synthetic_store

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("options", [(), ("train.optimizer=muon", "train.zero_stage=2")], ids=["adamw", "muon"])
def test_a_state_that_is_not_finite_stops_all_ranks_and_is_named(tmp_path, options):
    recipe = small_recipe(tmp_path)
    synthetic_store(recipe, "train", 60, seed=0, poisoned=40)
    synthetic_store(recipe, "validation", 6, seed=1)
    result = launch(recipe, "train.batches_per_step=2", *options, ranks=2)
    assert result.returncode != 0
    (folder,) = (recipe.run_dir / "nonfinite").iterdir()
    record = artifacts.read_json(folder / "record.json")
    assert ["train0040" in batch["ids"] for batch in record["batches"]] == [True]  # one rank's micro batch, named
    assert record["batches"][0]["inputs_finite"] == {"aux": False, "last_hidden": True}
    assert all(torch.isfinite(t).all() for t in load_file(folder / "model.safetensors").values())
    assert f"weights and sequences are in {folder}" in result.stderr
    assert record["step"] == len(entries(recipe.run_dir)) + 1
    assert not (recipe.run_dir / artifacts.MANIFEST).exists()


@pytest.mark.parametrize("stage", [0, 1])
def test_a_gradient_that_is_not_finite_leaves_the_weights_alone(fresh_recipe, stage):
    recipe, options = fresh_recipe(), (f"train.zero_stage={stage}", "train.checkpoint_every=2")
    result = launch(recipe, *options, script="tests/training/poisoned_gradient.py")
    assert result.returncode != 0
    assert "at step 3 with finite losses. Nothing was updated" in result.stderr
    saved = load_file(recipe.run_dir / "nonfinite" / "step_00000003" / "model.safetensors")
    good = load_file(recipe.run_dir / "checkpoints" / "step_00000002" / "model.safetensors")
    assert all(torch.equal(saved[name], good[name]) for name in good)
    assert "resuming from step 2" in run(recipe, *options)  # without the poison it goes on
