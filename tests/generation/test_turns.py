"""Chats generated turn by turn by the real target."""

from dataclasses import replace
from pathlib import Path

import pytest

from drafthead.artifacts import begin, read_json
from drafthead.config import Recipe
from drafthead.data.prompts import read_prompts
from drafthead.data.rendering import renderer, response_parser
from drafthead.data.responses import KIND, part_path, write_part
from drafthead.generation import regenerate as stage
from drafthead.generation.dialogue import ENDED, SplitRules
from drafthead.generation.prompts import make_prompts
from drafthead.progress import progress_bar
from drafthead.target.pieces import load_target_spec
from tests.artifacts import read_responses
from tests.generation.chats import chat_recipe
from tests.recipes import changed

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def generated(tmp_path_factory) -> Recipe:
    recipe = chat_recipe(tmp_path_factory.mktemp("chats"))
    make_prompts(recipe)
    stage.regenerate(recipe)
    return recipe


def test_each_turn_follows_the_targets_own_responses(generated: Recipe):
    tokenizer = stage.load_tokenizer(generated)
    render, read = renderer(generated, tokenizer), response_parser(tokenizer)
    prompts = {p.id: p for p in read_prompts(generated.prompts_dir, "train")}
    responses = {r.id: r for r in read_responses(generated.responses_dir("train"))}
    later = [r for r in responses.values() if r.turn]
    assert later
    for response in later:
        name = response.id.partition("-")[0]
        questions = [m for m in prompts[name].messages if m["role"] == "user"]
        history = []
        for turn in range(response.turn):
            message = read(responses[f"{name}-{turn + 1}"].response_ids)
            history += [questions[turn], {"role": "assistant", "content": message.content}]
        prompt = replace(prompts[name], messages=(*history, questions[response.turn]))
        assert response.prompt_ids == render(prompt, response.reasoning_effort)
        # The first prompt and its response are no beginning of the second prompt: the analysis is gone.
        before = responses[f"{name}-{response.turn}"]
        assert read(before.response_ids).thinking
        both = [*before.prompt_ids, *before.response_ids]
        assert response.prompt_ids[: len(both)] != both
        assert "analysis<|message|>" not in tokenizer.decode(response.prompt_ids)


def test_what_is_wrong_with_responses_is_counted_and_ends_conversations(tmp_path: Path, capsys: pytest.CaptureFixture):
    recipe = chat_recipe(tmp_path, "responses.max_tokens=40")  # not enough for the analysis and a final message
    make_prompts(recipe)
    prompts = read_prompts(recipe.prompts_dir, "train")
    questions = sum(m["role"] == "user" for p in prompts for m in p.messages)
    tokenizer = stage.load_tokenizer(recipe)
    with (
        stage.part_worker(recipe, load_target_spec(recipe.target_path)) as worker,
        progress_bar(questions, "test", "it") as bar,
    ):
        kept, ended = stage.make_responses(SplitRules(recipe, "train", tokenizer), worker.engine, prompts, bar)
        assert bar.n == questions
        strict = changed(recipe, "responses", drop=("truncated",))
        none, dropped = stage.make_responses(SplitRules(strict, "train", tokenizer), worker.engine, prompts, bar)
    assert all(r.flags[0] == "truncated" and r.turn == 0 and r.finish_reason == "length" for r in kept)
    assert {entry.reason for entry in ended} == {ENDED + "cut off"}
    assert len(kept) + sum(entry.turns for entry in ended) == questions
    assert not none
    assert [entry.id for entry in dropped if entry.flags] == [r.id for r in kept]

    for split in stage.SPLITS:  # the last step of the stage, over parts that are there
        begin(recipe.responses_dir(split), KIND, {})
        write_part(part_path(recipe.responses_dir(split), 0), kept, [*ended, *dropped])
        stage.finish_split(recipe.responses_dir(split))
    stage.print_responses(recipe)
    output = capsys.readouterr().out
    assert f"{2 * (questions - len(kept))}, {ENDED}cut off" in output
    assert f"truncated: {len(kept)}" in output
    counts = read_json(recipe.responses_dir("train") / "manifest.json")["counts"]
    assert counts["flagged"]["truncated"] == {"kept": len(kept), "dropped": len(kept)}
    write_part(part_path(tmp_path / "none", 0), [], dropped)
    with pytest.raises(ValueError, match="'dropped': 4"):
        stage.finish_split(tmp_path / "none")
