"""A head says which prompts it was made from, and only when they are those of its run."""

import pytest

from drafthead.config import Recipe
from drafthead.data.trained_on import read_trained_on
from drafthead.exporting.lineage import record_prompts
from drafthead.provenance import ArtefactError, begin, finish, reference
from tests.artefacts import ask, write_prompt_artefact
from tests.recipes import tiny_recipe


def write_chain(recipe: Recipe, responses_made_from: str | None = None) -> None:
    """Prompts, responses, states and run, empty but for the prompts, each naming what it was made from."""
    prompts = write_prompt_artefact(recipe)
    states = {}
    for split in ("train", "validation"):
        begin(recipe.responses_dir(split), "responses", {"prompts": responses_made_from or prompts})
        responses = reference(finish(recipe.responses_dir(split), {}))
        begin(recipe.states_dir(split), "states", {"responses": responses})
        states[split] = reference(finish(recipe.states_dir(split), {}))
    begin(recipe.run_dir, "run", {"states": states})
    finish(recipe.run_dir, {})


@pytest.fixture
def recipe(tmp_path) -> Recipe:
    return tiny_recipe(tmp_path)


def test_training_and_validation_prompts_are_recorded(recipe):
    write_chain(recipe)
    begin(recipe.head_dir, "head", {})
    record_prompts(recipe, recipe.head_dir)
    manifest = finish(recipe.head_dir, {})
    assert read_trained_on(recipe.head_dir, manifest) == {ask("train").id, ask("validation").id}
    (recipe.head_dir / "training_prompts.json").write_text('{"ids": []}')
    with pytest.raises(ArtefactError, match="not what the head's manifest lists"):
        read_trained_on(recipe.head_dir, manifest)


def test_prompts_of_another_run_are_refused(recipe):
    write_chain(recipe, responses_made_from="f" * 64)
    with pytest.raises(
        ArtefactError, match=r"responses/train was made from another version of .*prompts \(ffffffffffff"
    ):
        record_prompts(recipe, recipe.head_dir)


def test_without_the_prompts_nothing_is_claimed(recipe, capsys):
    begin(recipe.head_dir, "head", {})
    record_prompts(recipe, recipe.head_dir)
    assert "will not say which prompts" in capsys.readouterr().out
    assert read_trained_on(recipe.head_dir, finish(recipe.head_dir, {})) is None
