"""`responses.regenerate: false`: the responses of the data, from the prompts to tokens with a mask; no engine runs."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tqdm import tqdm

from drafthead.artifacts import ArtifactError, read_manifest
from drafthead.config import Recipe
from drafthead.data.prompts import read_prompts
from drafthead.data.rendering import BEYOND_VOCABULARY, BROKEN_OFF, IS_CONTEXT, NO_RESPONSE, NO_ROOM
from drafthead.data.responses import ResponseTokens, read_left_out
from drafthead.evaluation.workload import load_workload
from drafthead.generation import regenerate as stage
from drafthead.generation.prompts import make_prompts
from tests.artifacts import read_responses
from tests.generation.chats import write_chats
from tests.generation.small import SMALL, small_recipe
from tests.scripts import run_here


def mix(folder: Path, *overrides: str) -> Recipe:
    path = write_chats(folder / "chats.jsonl")
    source = f"{{name: ours, path: {path}, train: 20, heldout: 1, turns: all, heldout_share: 0.2}}"
    return small_recipe(
        folder, "prompts.path=null", f"prompts.sources=[{source}]", "prompts.max_train=null", "prompts.validation=2",
        "responses.regenerate=false", *overrides,
    )  # fmt: skip


def keep(recipe: Recipe) -> None:
    """The training split's parts, which is all that needs no engine."""
    worker = stage.PartWorker(recipe, stage.load_tokenizer(recipe))
    for part in stage.list_parts(recipe, "train"):
        worker.make(part, tqdm(disable=True))


def test_every_response_of_the_data_is_a_sequence_with_its_mask(tmp_path: Path):
    recipe = mix(tmp_path)
    make_prompts(recipe)
    keep(recipe)
    directory = recipe.responses_dir("train")
    prompts, responses = read_prompts(recipe.prompts_dir, "train"), read_responses(directory)
    assert [r.id for r in responses] == [p.id for p in prompts]
    assert max(len(p.messages) for p in prompts) > 1
    tokenizer, texts = stage.load_tokenizer(recipe), ResponseTokens(directory)
    for i, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        token_ids, mask = texts.tokens(i)
        masked = tokenizer.decode(token_ids[mask == 1])
        assert masked == f"<|channel|>final<|message|>{prompt.response['content']}<|return|>"
        assert tokenizer.decode(token_ids[mask == 0]).endswith(
            f"{prompt.messages[-1]['content']}<|end|><|start|>assistant"
        )
        assert (response.temperature, response.seed, response.finish_reason) == (None, None, "given")
    assert not read_left_out(directory)


def test_responses_that_are_missing_or_too_long_are_counted(tmp_path: Path):
    short = ("engine.max_model_len=90", "responses.max_tokens=8", "eval.max_tokens=8")
    recipe = mix(tmp_path, "prompts.validation=1", *short)
    write_chats(tmp_path / "chats.jsonl", answered=False)
    make_prompts(recipe)
    keep(recipe)
    reasons = {entry.reason for entry in read_left_out(recipe.responses_dir("train"))}
    assert reasons == {NO_RESPONSE, NO_ROOM}


def answered_ids(folder: Path, **last: Any) -> tuple[Path, dict[tuple, list[int]]]:
    """Rows of token ids with answers, every other one ending in the stop token <|return|>; the last row as given."""
    rows = [{"prompt_ids": [1, 40 + i, 41, 42], "response_ids": [50, 51 + i, 52, *[2] * (i % 2)]} for i in range(12)]
    rows[-1] |= last
    sides = ["heldout", *["train"] * 11]
    path = folder / "ids.jsonl"
    path.write_text("\n".join(json.dumps(row | {"split": side}) for row, side in zip(rows, sides, strict=True)))
    return path, {tuple(row["prompt_ids"] or ()): row["response_ids"] for row in rows}


@pytest.mark.slow
def test_answers_of_token_ids_are_taken_as_they_are(tmp_path: Path, capsys):
    path, answers = answered_ids(tmp_path, prompt_ids=[1, 60, 1_000_000])
    options = (f"prompts.path={path}", "prompts.validation=2", "prompts.max_train=null", f"output_dir={tmp_path}")
    options = (*SMALL, *options, "responses.regenerate=false")
    assert run_here("data_gen/prompts.py", *options) == 0
    assert run_here("data_gen/regenerate.py", *options) == 0
    recipe = small_recipe(tmp_path, *options)
    responses = read_responses(recipe.responses_dir("train"))
    assert len(responses) == 8  # one lies beyond the vocabulary
    assert all(list(r.response_ids) == answers[tuple(r.prompt_ids)] for r in responses)
    assert {r.flags == ["truncated"] for r in responses if r.response_ids[-1] != 2} == {True}
    assert {r.flags == [] for r in responses if r.response_ids[-1] == 2} == {True}
    assert {r.finish_reason for r in responses} == {"given", "length"}
    assert [entry.reason for entry in read_left_out(recipe.responses_dir("train"))] == [BEYOND_VOCABULARY]
    # Where they are not wanted that is said.
    assert run_here("data_gen/prompts.py", *options, "responses.regenerate=true", "name=other") == 0
    assert "come with response_ids, which are left out" in capsys.readouterr().out


def logged_rows() -> list[dict[str, Any]]:
    """Chats with a response as each format writes it, in turns: learned, not learned, cut off, filtered, a batch."""
    rows: list[dict[str, Any]] = []
    for i in range(25):
        ask, answer = {"role": "user", "content": f"Question {i}?"}, {"role": "assistant", "content": f"Answer {i}."}
        choice = {"message": answer, "finish_reason": {2: "length", 3: "content_filter"}.get(i % 5, "stop")}
        log = {"id": f"chatcmpl-{i}", "created": 1, "model": "m", "choices": [choice], "usage": {}}
        rows.append(
            [
                {"messages": [ask, {**answer, "weight": 1}]},
                {"messages": [ask, {**answer, "train": False}]},
                {**log, "messages": [ask]},
                {**log, "messages": [ask]},
                {"custom_id": str(i), "body": {"messages": [ask]}, "response": {"status_code": 200, "body": log}},
            ][i % 5]
        )
    return [row | {"split": "heldout" if i >= 20 else "train"} for i, row in enumerate(rows)]


@pytest.mark.slow
def test_logs_are_kept_as_what_they_are_under_the_variables_of_the_chat_template(tmp_path: Path, target: Path, capsys):
    """The template writes what it is told into the prompt; no stage takes what was made from other prompts."""
    path, template = tmp_path / "log.jsonl", target / "chat_template.jinja"
    path.write_text("\n".join(map(json.dumps, logged_rows())))
    text, marker = template.read_text(), "# Valid channels: analysis, final"
    assert marker in text
    template.write_text(text.replace(f'{marker}<|end|>"', f'{marker}" ~ ("" if thinks else " silent") ~ "<|end|>"'))
    options = (
        *SMALL, f"prompts.path={path}", "prompts.validation=5", "prompts.max_train=null", "prompts.max_heldout=null",
        f"output_dir={tmp_path}", f"target.path={target}", "responses.regenerate=false",
    )  # fmt: skip
    silent = (*options, "target.chat_template_kwargs={thinks: false}")
    assert run_here("data_gen/prompts.py", *silent) == 0
    assert run_here("data_gen/regenerate.py", *silent) == 0
    recipe = small_recipe(tmp_path, *silent)
    tokenizer, directory = stage.load_tokenizer(recipe), recipe.responses_dir("train")
    texts = {p.id: p.response["content"] for p in read_prompts(recipe.prompts_dir, "train") if p.response}
    stored, left_out = read_responses(directory), Counter(entry.reason for entry in read_left_out(directory))
    assert len(stored) + left_out.total() == len(texts) == 15
    assert set(left_out) == {IS_CONTEXT, BROKEN_OFF}
    for response in stored:
        number = int(texts[response.id].removeprefix("Answer ").removesuffix("."))
        is_cut = number % 5 == 2
        assert number % 5 in (0, 2, 4)
        assert response.text == f"<|channel|>final<|message|>{texts[response.id]}" + "<|return|>" * (not is_cut)
        assert (response.finish_reason, response.flags) == (("length", ["truncated"]) if is_cut else ("given", []))
    for response in (*stored, *read_responses(recipe.responses_dir("validation"))):
        assert f"{marker} silent<|end|>" in tokenizer.decode(response.prompt_ids)
    assert all(f"{marker} silent<|end|>" in tokenizer.decode(p.prompt_ids) for p in load_workload(recipe).prompts)
    assert run_here("data_gen/harvest.py", *silent, "states.backend=transformers") == 0
    manifest = read_manifest(recipe.states_dir("train"))
    assert manifest["identity"]["target"]["chat_template_kwargs"] == {"thinks": False}
    capsys.readouterr()
    for script in ("data_gen/regenerate.py", "data_gen/harvest.py", "train/eagle3.py"):
        assert run_here(script, *options, "states.backend=transformers") == 1
        assert "thinks" in capsys.readouterr().err


def test_data_without_an_answer_is_refused_before_an_engine_starts(tmp_path: Path, capsys, monkeypatch):
    path, _ = answered_ids(tmp_path)
    path.write_text(path.read_text().replace("response_ids", "metadata"))
    options = (f"prompts.path={path}", "prompts.validation=2", "prompts.max_train=null", f"output_dir={tmp_path}")
    options = (*SMALL, *options, "responses.regenerate=false")
    assert run_here("data_gen/prompts.py", *options) == 0
    monkeypatch.setattr(stage, "offline_engine", None)  # an engine would be another error
    assert run_here("data_gen/regenerate.py", *options) != 0
    assert "no train prompt has a response" in " ".join(capsys.readouterr().err.split())


def test_prompts_that_were_written_without_responses_are_refused(tmp_path: Path):
    recipe = mix(tmp_path)
    regenerating = recipe.changed("responses", regenerate=True, history="given")
    make_prompts(regenerating)
    assert all(prompt.response is None for prompt in read_prompts(recipe.prompts_dir, "train"))
    with pytest.raises(ArtifactError, match="responses.regenerate is false"):
        stage.regenerate(recipe)
