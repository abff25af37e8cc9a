"""The draft vocabulary of a run: by count or by coverage, with the template's control tokens, reported by category."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file

from drafthead.drafters.registry import drafter_of
from drafthead.drafters.vocabulary import coverage
from drafthead.exporting.card import write_card
from drafthead.exporting.export import export_head
from drafthead.target.spec import load_target_spec
from drafthead.target.tokenizer import special_tokens
from drafthead.training.inputs import Survey, draft_vocabulary, open_inputs, survey
from tests.artifacts import response, write_response_artifact
from tests.training import launching

BY_COVERAGE = ("head.draft_vocab_size=0", "head.coverage=0.9")


def test_size_follows_coverage_and_control_tokens_are_in(fresh_recipe):
    recipe = fresh_recipe(*BY_COVERAGE)
    inputs = open_inputs(recipe)
    categories = {name: "even" if i % 2 == 0 else "odd" for i, name in enumerate(inputs.train.ids[:-1])}
    token_survey = survey(inputs.train, inputs.spec.vocab_size, 96, drafter_of(recipe.head), categories)
    vocabulary = draft_vocabulary(recipe, token_survey)
    assert coverage(token_survey.generated, vocabulary) >= 0.9
    assert len(vocabulary.d2t) % 64 == 0
    _, emitted = special_tokens(recipe)
    assert vocabulary.t2d[torch.tensor(sorted(emitted))].all()
    assert set(token_survey.by_category) == {"even", "odd"}
    last = inputs.train.tokens(len(inputs.train) - 1)  # its category is not known
    missing = torch.bincount(last[0][last[1] == 1], minlength=inputs.spec.vocab_size)
    assert torch.equal(sum(token_survey.by_category.values()) + missing, token_survey.generated)


def test_special_tokens_past_the_rows_of_lm_head_are_left_out(fresh_recipe):
    """As the image token of a multimodal tokenizer: the head has no row to copy for it."""
    recipe = fresh_recipe("head.draft_vocab_size=4")
    ids = torch.tensor(sorted(special_tokens(recipe)[1]))
    few = int(ids.median())  # as if the target's vocabulary ended among the special tokens
    counts = torch.ones(few, dtype=torch.long)
    vocabulary = draft_vocabulary(recipe, Survey(counts, torch.zeros_like(counts), [], 0, {}))
    assert vocabulary.t2d[ids[ids < few]].all()
    assert len(vocabulary.t2d) == few


@pytest.mark.slow
def test_a_run_by_coverage_trains_reports_and_exports(fresh_recipe):
    recipe = fresh_recipe(*BY_COVERAGE)
    (recipe.directory() / "data").unlink()
    shutil.copytree(fresh_recipe(name="source").directory() / "data", recipe.directory() / "data")
    with_categories(recipe)
    output = launching.run(recipe, *BY_COVERAGE)
    size = int(output.split("draft vocabulary ")[1].split(" of ")[0])
    assert size % 64 == 0
    assert size < 256
    assert "\n  chat                 " in output
    assert "\n  code                 " in output
    head = export_head(recipe, serve_check=False)  # the texts are made up: nothing to serve
    tensors, config = load_file(head / "model.safetensors"), json.loads((head / "config.json").read_text())
    assert config["draft_vocab_size"] == len(tensors["d2t"]) == tensors["lm_head.weight"].shape[0] == size
    assert load_target_spec(recipe.target_path).vocab_size == len(tensors["t2d"])
    assert f"draft vocabulary {size}," in write_card(recipe).read_text()


def with_categories(recipe) -> None:
    """Responses that say which category each training sequence belongs to."""
    names = enumerate(open_inputs(recipe).train.ids)
    responses = [response(name, 0, 0, category=("chat", "code")[i % 2]) for i, name in names]
    write_response_artifact(recipe.responses_dir("train"), responses)
