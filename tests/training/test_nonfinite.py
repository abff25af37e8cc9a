"""A loss or gradient that is not finite stops the run before it reaches a checkpoint."""

import pytest

from drafthead import artifacts
from tests.training.launching import checkpoints, entries, launch, run
from tests.training.synthetic import small_recipe, synthetic_store

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("split", "what", "poisoned"), [("train", "poisoned", 40), ("validation", "poisoned", 3), ("train", "infinite", 40)]
)
def test_a_state_that_is_not_finite_stops_all_ranks_and_is_named(tmp_path, split, what, poisoned):
    recipe = small_recipe(tmp_path)
    for seed, (name, count) in enumerate((("train", 60), ("validation", 6))):
        synthetic_store(recipe, name, count, seed, **{what: poisoned} if name == split else {})
    result = launch(recipe, "train.batches_per_step=2", "train.optimizer=muon", "train.zero_stage=2", ranks=2)
    assert result.returncode != 0
    first = split == "validation"  # which comes before any step
    where = "the validation that follows step 0" if first else f"step {len(entries(recipe.run_dir)) + 1}"
    assert f"{where} has loss nan" in result.stderr
    assert f"not finite: {split}{poisoned:04d}." in result.stderr
    assert not (recipe.run_dir / artifacts.MANIFEST).exists()


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
