"""`responses.regenerate: false`: the responses of the data, from the prompts to tokens with a mask; no engine runs."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tqdm import tqdm

from drafthead.artifacts import ArtifactError
from drafthead.config import Recipe
from drafthead.data.prompts import read_prompts
from drafthead.data.rendering import NO_RESPONSE
from drafthead.data.responses import ResponseTokens, read_left_out, read_responses
from drafthead.generation import regenerate as stage
from drafthead.generation.dialogue import NO_ROOM
from drafthead.generation.prompts import make_prompts
from tests.generation.chats import write_chats
from tests.recipes import changed

MIX = (
    "prompts.path=null",
    "prompts.sources=[{name: ours, path: CHATS, train: 20, heldout: 1, turns: all, heldout_share: 0.2}]",
    "prompts.max_train=null",
    "prompts.validation=2",
    "responses.regenerate=false",
)


def mix(recipe_in: Callable[..., Recipe], folder: Path, *overrides: str) -> Recipe:
    path = write_chats(folder / "chats.jsonl")
    return recipe_in(*(option.replace("CHATS", str(path)) for option in MIX), *overrides)


def keep(recipe: Recipe) -> None:
    """The training split's parts, which is all that needs no engine."""
    worker = stage.PartWorker(recipe, stage.load_tokenizer(recipe))
    for part in stage.list_parts(recipe, "train"):
        worker.make(part, tqdm(disable=True))


def test_every_response_of_the_data_is_a_sequence_with_its_mask(recipe_in: Callable[..., Recipe], tmp_path: Path):
    recipe = mix(recipe_in, tmp_path)
    make_prompts(recipe)
    keep(recipe)
    directory = recipe.responses_dir("train")
    prompts, responses = read_prompts(recipe.prompts_dir, "train"), read_responses(directory)
    assert [r.id for r in responses] == [p.id for p in prompts]
    assert max(len(p.messages) for p in prompts) > 1
    tokenizer, texts = stage.load_tokenizer(recipe), ResponseTokens(directory)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        assert prompt.response is not None
        token_ids, mask = texts.tokens(i)
        masked = tokenizer.decode(token_ids[mask])
        assert masked == f"<|channel|>final<|message|>{prompt.response['content']}<|return|>"
        assert tokenizer.decode(token_ids[~mask]).endswith(f"{prompt.messages[-1]['content']}<|end|><|start|>assistant")
        assert (response.temperature, response.seed, response.finish_reason) == (None, None, "given")
    assert not read_left_out(directory)


def test_responses_that_are_missing_or_too_long_are_counted(recipe_in: Callable[..., Recipe], tmp_path: Path):
    recipe = mix(recipe_in, tmp_path, "engine.max_model_len=90", "responses.max_tokens=8", "eval.max_tokens=8")
    write_chats(tmp_path / "chats.jsonl", answered=False)
    make_prompts(recipe)
    keep(recipe)
    reasons = {entry.reason for entry in read_left_out(recipe.responses_dir("train"))}
    assert reasons == {NO_RESPONSE, NO_ROOM}


def test_prompts_that_were_written_without_responses_are_refused(recipe_in: Callable[..., Recipe], tmp_path: Path):
    recipe = mix(recipe_in, tmp_path)
    regenerating = changed(recipe, "responses", regenerate=True, history="given")
    make_prompts(regenerating)
    assert all(prompt.response is None for prompt in read_prompts(recipe.prompts_dir, "train"))
    with pytest.raises(ArtifactError, match="responses.regenerate is false"):
        stage.regenerate(recipe)


def test_every_turn_as_a_prompt_does_not_go_with_regeneration(recipe_in: Callable[..., Recipe], tmp_path: Path):
    with pytest.raises(ValueError, match="turns: all"):
        mix(recipe_in, tmp_path, "responses.regenerate=true")
