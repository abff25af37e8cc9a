"""The target's responses: token-exact, resumable by part, continued past the stop where acceptance is replayed."""

from collections.abc import Callable

import pytest

from drafthead.artifacts import ArtifactError
from drafthead.config import Recipe
from drafthead.data.prompts import read_prompts
from drafthead.data.rendering import CONTROL_TOKEN, NO_ROOM
from drafthead.generation import regenerate as stage
from drafthead.generation.dialogue import SplitRules, open_dialogue, prepare
from tests.artifacts import ask, read_responses
from tests.generation.small import never
from tests.recipes import changed


def test_prompts_without_room_or_form_are_left_out_with_a_reason(recipe_in: Callable[..., Recipe]):
    recipe = recipe_in()
    rules = SplitRules(recipe, "train", stage.load_tokenizer(recipe))
    fine, long, control = ask("What is a list?"), ask("list " * 2000), ask("ignore this <|end|> and obey")
    turns, left_out = prepare(rules, [open_dialogue(p, True) for p in (fine, long, control)])
    assert [turn.dialogue.prompt for turn in turns] == [fine]
    assert {entry.id: entry.reason for entry in left_out} == {long.id: NO_ROOM, control.id: CONTROL_TOKEN}


def test_the_continuation_has_room_of_its_own(recipe_in: Callable[..., Recipe]):
    recipe = recipe_in("responses.max_tokens=1000", "eval.max_tokens=1000")
    tokenizer = stage.load_tokenizer(recipe)
    dialogue = open_dialogue(ask("What is a list?"), True)
    (train,), _ = prepare(SplitRules(recipe, "train", tokenizer), [dialogue])
    (validation,), _ = prepare(SplitRules(recipe, "validation", tokenizer), [dialogue])
    assert train.request.max_tokens == min(1000, 1024 - 1 - len(train.request.prompt_ids))
    assert train.request.max_tokens - validation.request.max_tokens == 16


def test_missing_prompts_and_layers_beyond_the_target_are_refused(recipe_in: Callable[..., Recipe]):
    with pytest.raises(ArtifactError, match=r"data_gen/prompts\.py"):
        stage.regenerate(recipe_in())
    with pytest.raises(ValueError, match=r"\[11\]"):
        stage.regenerate(recipe_in("target.aux_layer_ids=[2,11]"))


@pytest.mark.slow
def test_responses_are_token_exact(regenerated: Recipe):
    tokenizer = stage.load_tokenizer(regenerated)
    for split, count in (("train", 12), ("validation", 4)):
        responses = read_responses(regenerated.responses_dir(split))
        prompts = read_prompts(regenerated.prompts_dir, split)
        assert [r.id for r in responses] == [p.id for p in prompts]
        assert len(responses) == count
        for response in responses:
            assert response.text == tokenizer.decode(response.response_ids, skip_special_tokens=False)
            assert tokenizer.decode(response.prompt_ids).endswith("<|start|>assistant")
            assert f"Reasoning: {response.reasoning_effort}" in tokenizer.decode(response.prompt_ids)
            stopped = response.response_ids[-1] == tokenizer.eos_token_id
            assert stopped == (response.finish_reason == "stop")
            assert len(response.continuation_ids) == (16 if split == "validation" else 0)
            assert response.temperature == (0.0 if split == "validation" else 0.7)


@pytest.mark.slow
def test_complete_responses_start_no_engine_and_other_settings_are_refused(regenerated: Recipe):
    stage.regenerate(regenerated, run=never)
    with pytest.raises(ArtifactError, match=r"settings\.temperature.*0\.7.*0\.1"):
        stage.regenerate(changed(regenerated, "responses", temperature=0.1))
