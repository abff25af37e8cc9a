"""A loss or gradient that is not finite stops the run before it reaches a checkpoint."""

import pytest

from drafthead import artifacts
from tests.training.launching import checkpoints, entries, launch, run
from tests.training.synthetic import small_recipe, synthetic_store

pytestmark = pytest.mark.slow


def test_a_state_that_is_not_finite_stops_all_ranks_and_is_named(tmp_path):
    recipe = small_recipe(tmp_path)
    synthetic_store(recipe, "train", 60, seed=0, poisoned=40)
    synthetic_store(recipe, "validation", 6, seed=1)
    result = launch(recipe, "train.batches_per_step=2", "train.optimizer=muon", "train.zero_stage=2", ranks=2)
    assert result.returncode != 0
    assert f"step {len(entries(recipe.run_dir)) + 1} has loss nan" in result.stderr
    assert "not finite: train0040." in result.stderr
    assert not (recipe.run_dir / artifacts.MANIFEST).exists()


def test_a_validation_that_is_not_finite_names_its_sequences(tmp_path):
    recipe = small_recipe(tmp_path)
    synthetic_store(recipe, "train", 60, seed=0)
    synthetic_store(recipe, "validation", 6, seed=1, poisoned=3)
    result = launch(recipe)
    assert result.returncode != 0
    assert "the validation that follows step 0 has loss nan" in result.stderr
    assert "not finite: validation0003." in result.stderr


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_gradient_that_is_not_finite_reaches_no_checkpoint(fresh_recipe, stage):
    recipe, options = fresh_recipe(), (f"train.zero_stage={stage}", "train.checkpoint_every=2")
    result = launch(recipe, *options, script="tests/training/poisoned_gradient.py")
    assert result.returncode != 0
    assert "step 3 has loss" in result.stderr
    assert "not finite: none." in result.stderr
    assert [path.name for path in checkpoints(recipe.run_dir)] == ["step_00000002"]
    if stage == 3:  # that every stage resumes is tried in test_ranks.py
        assert "resuming from step 2" in run(recipe, *options)  # without the poison it goes on
