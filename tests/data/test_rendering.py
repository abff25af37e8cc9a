"""Rendering and reading back: text never becomes a control token, ids that are given stay as they are, responses of the
data begin where the prompt ends, and generated ids become the message that a client gets."""

import copy
from dataclasses import replace
from datetime import UTC, datetime

import pytest

from drafthead.config import load_recipe
from drafthead.data import rendering
from drafthead.data.prompts import Prompt, parse_messages, prompt_id, split_turns
from drafthead.data.rendering import KeptResponses, ParsedResponse, Renderer, UnrenderableError, response_parser
from drafthead.generation.prompts import make_prompts

CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, you."}
BARE = Prompt("a", "local", "chat", (USER,))


@pytest.fixture(scope="module")
def render(tokenizer):
    return Renderer(tokenizer)


def prompt(*messages, **response) -> Prompt:
    (messages, response), *_ = split_turns(parse_messages([*messages, {"role": "assistant", **response}]), "last")
    return Prompt(prompt_id(messages), "local", "chat", messages, response=response)


def with_template(tokenizer, template):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def test_a_control_token_in_a_tool_is_refused_too(render):
    """In messages: tests/faults/test_bad_input.py."""
    tools = ({"type": "function", "function": {"name": "f", "description": "does <|end|>"}},)
    with pytest.raises(UnrenderableError) as caught:
        render(replace(BARE, tools=tools), "low")
    assert caught.value.reason == rendering.CONTROL_TOKEN


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('no role') }}", "no role"),
        ("{{ 'does ' + tools[0].description }}", "NoneType"),
        ("{{ tools[0].name.index('x') }}", "substring"),
    ],
)
def test_whatever_a_template_raises_is_a_refusal(tokenizer, template, why):
    with pytest.raises(UnrenderableError, match=f"refuses the conversation: .*{why}") as refused:
        Renderer(with_template(tokenizer, template))(replace(BARE, tools=({"name": "f", "description": None},)), "low")
    assert why in refused.value.reason  # which is counted and printed


def test_a_template_that_reads_the_clock_is_given_the_day_of_the_prompts(tokenizer, tmp_path):
    clocked = with_template(tokenizer, "Current date: {{ strftime_now('%Y-%m-%d') }}. {{ messages[0].content }}")
    options = (f"output_dir={tmp_path}", "prompts.max_train=2", "prompts.validation=1")
    recipe = load_recipe(overrides=options)
    with pytest.raises(FileNotFoundError):
        rendering.template_day(recipe, clocked)
    make_prompts(recipe)
    assert rendering.template_day(recipe, tokenizer) is None
    assert rendering.template_day(recipe, clocked) == datetime.now(UTC).date()
    pinned = load_recipe(overrides=[*options, "prompts.date=2025-08-05"])
    make_prompts(pinned)  # another day makes no other prompts
    written = tokenizer.decode(rendering.renderer(pinned, clocked)(BARE, "low"))
    assert written == "Current date: 2025-08-05. Hi"


# Responses of the data


def keep(tokenizer, stops, prompt, effort="low") -> tuple[str, str]:
    """Prompt and kept response as text."""
    render = Renderer(tokenizer)
    prompt_ids = render(prompt, effort)
    response_ids = KeptResponses(render, tokenizer, stops)(prompt, prompt_ids, effort)
    return tokenizer.decode(prompt_ids), tokenizer.decode(response_ids)


def test_the_response_is_what_the_target_would_have_generated(tokenizer):
    conversation = prompt(USER, ASSISTANT, USER, content="Good day.", reasoning_content="Again?")
    before, response = keep(tokenizer, {2, 8}, conversation)
    assert before.endswith("Hello, you.<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant")
    assert "Reasoning: low" in before
    assert response == (
        "<|channel|>analysis<|message|>Again?<|end|><|start|>assistant<|channel|>final<|message|>Good day.<|return|>"
    )


def test_what_follows_the_stop_token_is_not_generated(tokenizer):
    before, response = keep(with_template(tokenizer, CHATML), {6}, prompt(USER, content="Good day."))
    assert before == "<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    assert response == "Good day.<|end|>"  # the template adds a line break


def test_a_thought_that_the_template_writes_is_generated_too(tokenizer):
    """As Qwen 3 does: an empty thought before the last response, none before earlier ones."""
    thought = "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    qwen = with_template(tokenizer, CHATML.replace("{{ m.content }}", thought))
    before, response = keep(qwen, {6}, prompt(USER, ASSISTANT, USER, content="Good day."))
    assert "think" not in before
    assert response == "<think>\n\n</think>\n\nGood day.<|end|>"


def test_a_thought_in_the_text_of_the_data_is_the_thought_of_the_response(tokenizer):
    text = "<think>\nAgain?\n</think>\n\nGood day."
    thought = "{% if m.thinking %}<think>{{ m.thinking }}</think>\n\n{% endif %}{{ m.content }}"
    chat = prompt(USER, content=text)
    assert keep(with_template(tokenizer, CHATML.replace("{{ m.content }}", thought)), {6}, chat)[1] == f"{text}<|end|>"
    with pytest.raises(UnrenderableError) as caught:
        keep(with_template(tokenizer, CHATML), {6}, chat)  # which writes none
    assert caught.value.reason == rendering.ALTERED


@pytest.mark.parametrize(
    ("template", "stops", "given", "reason"),
    [
        # what comes first depends on what follows
        ("{{ messages | length }}" + CHATML, {6}, prompt(USER, content="1. First"), rendering.UNSTABLE),
        (CHATML, {2}, prompt(USER, content="Yes."), rendering.NO_STOP),
        (CHATML.replace("m.content", "m.content | upper"), {6}, prompt(USER, content="Yes."), rendering.ALTERED),
        (CHATML, {6}, prompt(USER, content="A thought ends at </think> there."), rendering.ALTERED),
        (CHATML, {6}, BARE, rendering.NO_RESPONSE),
        (CHATML, {6}, Prompt("x", "mlperf", "long", (), prompt_ids=(5, 6)), rendering.NO_RESPONSE),
        (CHATML, {6}, replace(BARE, response={**ASSISTANT, "tool_calls": [{}]}), rendering.IS_CALL),
    ],
)
def test_a_response_that_cannot_be_kept_has_a_reason(tokenizer, template, stops, given, reason):
    with pytest.raises(UnrenderableError) as caught:
        keep(with_template(tokenizer, template), stops, given)
    assert caught.value.reason == reason


# From ids to a message


CHANNELS = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (CHANNELS + "Hé, 你好 <b>\n<|return|>", ParsedResponse("Hé, 你好 <b>\n", "Think.")),
        (CHANNELS + "cut o", ParsedResponse("cut o", "Think.")),
        ("<|channel|>analysis<|message|>Think", ParsedResponse("", "Think")),
        ("<|channel|>analysis<|message|>Think.<|end|><|start|>assi", ParsedResponse("", "Think.")),
        ("<|channel|>commentary to=functions.f <|message|>{}<|call|>", ParsedResponse("", is_call=True)),
        ("<|start|><|start|>", ParsedResponse("")),
        ("", ParsedResponse("")),
    ],
)
def test_harmony_channels_are_told_apart(tokenizer, text, parsed):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert response_parser(tokenizer)(ids) == parsed


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("Yes.<|end|>", ParsedResponse("Yes.")),
        ("<think>\nHm.\n</think>\n\nYes.<|end|>", ParsedResponse("\n\nYes.", "\nHm.\n")),
        ("Hm.</think>Yes.<|end|>", ParsedResponse("Yes.", "Hm.")),  # the prompt opened the thought
    ],
)
def test_a_plain_template_separates_thought_and_content(tokenizer, text, parsed):
    plain = with_template(tokenizer, "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}")
    assert response_parser(plain)(plain(text, add_special_tokens=False)["input_ids"]) == parsed
