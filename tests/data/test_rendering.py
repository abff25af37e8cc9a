"""Rendering: text never becomes a control token, ids that are given stay as they are."""

import copy
from datetime import UTC, datetime

import pytest

from drafthead.config import load_recipe
from drafthead.data import rendering
from drafthead.data.prompts import Prompt, prompt_id
from drafthead.generation.prompts import make_prompts


@pytest.fixture(scope="module")
def render(tokenizer):
    return rendering.Renderer(tokenizer)


def prompt_of(*contents: str, role: str = "user", **more) -> Prompt:
    messages = tuple({"role": role, "content": text} for text in contents)
    return Prompt(prompt_id(messages), "local", "chat", messages, **more)


def test_the_token_ids_of_plain_text_are_those_of_the_chat_template(render, tokenizer):
    prompt = prompt_of("What is a list?")
    expected = tokenizer.apply_chat_template(
        list(prompt.messages), add_generation_prompt=True, reasoning_effort="low", return_dict=False
    )
    assert render(prompt, "low") == expected


def test_a_control_token_in_a_tool_is_refused_too(render):
    """In messages: tests/faults/test_bad_input.py."""
    tools = ({"type": "function", "function": {"name": "f", "description": "does <|end|>"}},)
    with pytest.raises(rendering.UnrenderableError) as caught:
        render(prompt_of("hello", tools=tools), "low")
    assert caught.value.reason == rendering.CONTROL_TOKEN


def test_given_ids_are_read_as_they_are(render):
    assert render(Prompt("x", "mlperf", "long", (), prompt_ids=(5, 6, 7)), "high") == [5, 6, 7]
    with pytest.raises(rendering.UnrenderableError, match=r"beyond the target's vocabulary: 200006, but there are"):
        render(Prompt("x", "mlperf", "long", (), prompt_ids=(5, 200006)), "low")


def test_a_conversation_that_the_template_refuses_has_a_reason(render):
    with pytest.raises(rendering.UnrenderableError, match=r"refuses the conversation: role must be"):
        render(prompt_of("{}", role="tool"), "low")


@pytest.mark.parametrize("template", ["{{ 'does ' + tools[0].description }}", "{{ tools[0].name.index('x') }}"])
def test_whatever_a_template_raises_is_a_refusal(tokenizer, template):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = template
    with pytest.raises(rendering.UnrenderableError, match="refuses the conversation"):
        rendering.Renderer(tokenizer)(prompt_of("Hi", tools=({"name": "f", "description": None},)), "low")


def test_a_template_that_reads_the_clock_is_given_the_day_of_the_prompts(tokenizer, tmp_path):
    clocked = copy.deepcopy(tokenizer)
    clocked.chat_template = "Current date: {{ strftime_now('%Y-%m-%d') }}. {{ messages[0].content }}"
    options = (f"output_dir={tmp_path}", "prompts.max_train=2", "prompts.validation=1")
    recipe = load_recipe(overrides=options)
    with pytest.raises(FileNotFoundError):
        rendering.template_day(recipe, clocked)
    make_prompts(recipe)
    assert rendering.template_day(recipe, tokenizer) is None
    assert rendering.template_day(recipe, clocked) == datetime.now(UTC).date()
    pinned = load_recipe(overrides=[*options, "prompts.date=2025-08-05"])
    make_prompts(pinned)  # another day makes no other prompts
    written = tokenizer.decode(rendering.renderer(pinned, clocked)(prompt_of("Hello"), "low"))
    assert written == "Current date: 2025-08-05. Hello"
