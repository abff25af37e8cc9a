"""A target whose branch moved on between two stages, in a hub cache as huggingface_hub lays it out."""

import shutil
from pathlib import Path

import pytest

from drafthead import artifacts
from drafthead.artifacts import ArtifactError
from drafthead.config import Recipe, load_recipe
from drafthead.config.evaluation import HEAD
from drafthead.data.responses import KIND as RESPONSES
from drafthead.evaluation.workload import BASELINE, EvalPrompt, Workload, identity
from drafthead.exporting.export import open_checkpoint
from drafthead.generation.harvest import claim
from drafthead.generation.prompts import make_prompts
from drafthead.generation.regenerate import regenerate
from drafthead.target.spec import load_target_spec, target_identity
from drafthead.training.inputs import open_inputs
from tests.artifacts import cached_snapshot
from tests.exporting.runs import write_run
from tests.training.synthetic import small_recipe, synthetic_stores

OLD, NEW = "a" * 40, "b" * 40


@pytest.fixture
def hub(hub_cache) -> Path:
    """A cache with two commits of one model; its main branch and its tag v1 are the older one."""
    model = cached_snapshot(hub_cache, "models--acme--tiny", OLD).parents[1]
    for commit in (OLD, NEW):
        shutil.copytree(load_recipe().target_path, model / "snapshots" / commit, dirs_exist_ok=True)
    (model / "refs" / "v1").write_text(OLD)
    return model


def move_main(hub: Path) -> None:
    (hub / "refs" / "main").write_text(NEW)


def recipe_at(folder: Path, *overrides: str) -> Recipe:
    return small_recipe(folder / "out", "target.path=acme/tiny", *overrides)


def claim_for_target(recipe: Recipe, directory: Path, kind: str) -> None:
    artifacts.begin(directory, kind, {"target": target_identity(recipe, load_target_spec(recipe.target_path))})
    artifacts.finish(directory, {})


def both(recipe: Recipe, recorded: dict) -> list[str]:
    """The two targets as a message names them."""
    spec = load_target_spec(recipe.target_path)
    assert spec.fingerprint != recorded["fingerprint"]
    return [f"acme/tiny (fingerprint {fingerprint[:12]}" for fingerprint in (recorded["fingerprint"], spec.fingerprint)]


@pytest.fixture
def moved(hub, tmp_path) -> tuple[Recipe, list[str]]:
    """Every artifact was made from the older commit; then main moved."""
    recipe = recipe_at(tmp_path)
    make_prompts(recipe)
    claim_for_target(recipe, recipe.responses_dir("train"), RESPONSES)
    synthetic_stores(recipe, 4, 4)
    write_run(recipe)
    claim_for_target(recipe, recipe.head_dir, "head")
    identity = target_identity(recipe, load_target_spec(recipe.target_path))
    move_main(hub)
    return recipe, both(recipe, identity)


STAGES = {
    "harvest": lambda recipe: claim(recipe, load_target_spec(recipe.target_path), "train"),
    "train": open_inputs,
    "export": lambda recipe: open_checkpoint(recipe, None, load_target_spec(recipe.target_path)),
    "evaluate": lambda recipe: identity(recipe, Workload([EvalPrompt("p", "chat", [5])], 0), (BASELINE, HEAD)),
}


@pytest.mark.parametrize("stage", STAGES)
def test_each_stage_names_both_targets(moved, stage):
    recipe, targets = moved
    with pytest.raises(ValueError, match="acme/tiny") as error:
        STAGES[stage](recipe)
    assert all(target in str(error.value) for target in targets)


def test_responses_of_two_commits_do_not_meet_in_one_folder(moved):
    recipe, _ = moved
    with pytest.raises(ArtifactError, match=r"(?s)responses/train.*fingerprint"):
        regenerate(recipe)


def test_the_same_commit_by_another_name_is_the_same_target(hub, tmp_path):
    recipe = recipe_at(tmp_path)
    synthetic_stores(recipe, 4, 4)
    write_run(recipe)
    move_main(hub)
    tagged = recipe_at(tmp_path, "target.revision=v1")
    assert len(open_inputs(tagged).train) == 4
    open_checkpoint(tagged, None, load_target_spec(tagged.target_path, "v1"))


def test_a_revision_that_is_nowhere_is_named(hub, tmp_path):
    recipe = recipe_at(tmp_path, "target.revision=v9")
    with pytest.raises(FileNotFoundError, match=r"config\.json.*acme/tiny.*v9"):
        load_target_spec(recipe.target_path, recipe.target.revision)
