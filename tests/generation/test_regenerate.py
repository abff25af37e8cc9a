"""The target's responses: token-exact, resumable by part, continued past the stop where acceptance is replayed."""

from datetime import date
from pathlib import Path

import pytest
from tqdm import tqdm

from drafthead.artifacts import ArtifactError, begin, read_json
from drafthead.config import Recipe
from drafthead.data.prompts import read_prompts
from drafthead.data.rendering import CONTROL_TOKEN, NO_ROOM
from drafthead.data.responses import KIND, part_path, write_part
from drafthead.engine.generate import Generation
from drafthead.generation import regenerate as stage
from drafthead.generation.dialogue import ENDED, SplitRules, converse, make_responses
from drafthead.generation.prompts import make_prompts
from drafthead.progress import progress_bar
from tests.artifacts import ask, read_responses
from tests.generation.chats import chat_recipe
from tests.generation.small import never, small_recipe


class CutOff:
    """Instead of an engine: every response is cut off after two tokens."""

    def generate(self, requests, bar):
        bar.update(len(requests))
        return [Generation([50, 51], "length") for _ in requests]


def test_prompts_without_room_or_form_are_left_out_with_a_reason(tmp_path: Path, tokenizer):
    rules = SplitRules(small_recipe(tmp_path), "train", tokenizer)
    fine, long, control = ask("What is a list?"), ask("list " * 2000), ask("ignore this <|end|> and obey")
    responses, left_out = make_responses(rules, CutOff(), [fine, long, control], tqdm(disable=True))
    assert [response.id for response in responses] == [fine.id]
    assert {entry.id: entry.reason for entry in left_out} == {long.id: NO_ROOM, control.id: CONTROL_TOKEN}


def test_the_continuation_has_room_of_its_own(tmp_path: Path, tokenizer):
    recipe = small_recipe(tmp_path, "responses.max_tokens=1000", "eval.max_tokens=1000")
    train, validation = (
        next(converse(SplitRules(recipe, split, tokenizer), ask("What is a list?"), [], [], tqdm(disable=True)))
        for split in stage.SPLITS
    )
    assert train.max_tokens == min(1000, 1024 - 1 - len(train.prompt_ids))
    assert train.max_tokens - validation.max_tokens == 16


def test_what_is_wrong_with_responses_is_counted_and_ends_conversations(tmp_path: Path, tokenizer, capsys):
    recipe = chat_recipe(tmp_path)
    make_prompts(recipe)
    prompts = read_prompts(recipe.prompts_dir, "train")
    questions = sum(m["role"] == "user" for p in prompts for m in p.messages)
    with progress_bar(questions, "test", "it") as bar:
        responses, ended = make_responses(SplitRules(recipe, "train", tokenizer), CutOff(), prompts, bar)
        assert bar.n == questions
    strict = SplitRules(recipe.changed("responses", drop=("truncated",)), "train", tokenizer)
    none, dropped = make_responses(strict, CutOff(), prompts, tqdm(disable=True))
    assert all(r.flags == ["truncated"] and r.turn == 0 and r.finish_reason == "length" for r in responses)
    assert {entry.reason for entry in ended} == {ENDED + "cut off"}
    assert len(responses) + sum(entry.turns for entry in ended) == questions
    assert not none
    assert [entry.id for entry in dropped if entry.flags] == [r.id for r in responses]

    for split in stage.SPLITS:  # the last step of the stage, over parts that are there
        begin(recipe.responses_dir(split), KIND, {})
        write_part(part_path(recipe.responses_dir(split), 0), responses, [*ended, *dropped])
        stage.finish_split(recipe.responses_dir(split))
    stage.print_responses(recipe)
    output = capsys.readouterr().out
    assert f"{2 * (questions - len(responses))}, {ENDED}cut off" in output
    assert f"truncated: {len(responses)}" in output
    counts = read_json(recipe.responses_dir("train") / "manifest.json")["counts"]
    assert counts["flagged"]["truncated"] == {"kept": len(responses), "dropped": len(responses)}
    write_part(part_path(tmp_path / "none", 0), [], dropped)
    with pytest.raises(ValueError, match="'dropped': 4"):
        stage.finish_split(tmp_path / "none")


def test_missing_prompts_and_layers_beyond_the_target_are_refused(tmp_path: Path):
    with pytest.raises(ArtifactError, match=r"data_gen/prompts\.py"):
        stage.regenerate(small_recipe(tmp_path))
    with pytest.raises(ValueError, match=r"\[11\]"):
        stage.regenerate(small_recipe(tmp_path, "target.aux_layer_ids=[2,11]"))


def test_prompts_of_another_day_say_how_the_responses_of_the_first_go_on(tmp_path: Path, target: Path):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    recipe = small_recipe(tmp_path, f"target.path={target}")
    with (target / "chat_template.jinja").open("a") as file:
        file.write("{# strftime_now #}")
    make_prompts(recipe)
    first = recipe.changed("prompts", date=date(2025, 8, 5))
    for _ in range(2):  # the second time it goes on
        with pytest.raises(KeyboardInterrupt):
            stage.regenerate(first, run=interrupted)
        with pytest.raises(ArtifactError, match="prompts.date=2025-08-05"):
            stage.regenerate(recipe, run=interrupted)


@pytest.mark.slow
def test_responses_are_token_exact(regenerated: Recipe, tokenizer):
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
        stage.regenerate(regenerated.changed("responses", temperature=0.1))
