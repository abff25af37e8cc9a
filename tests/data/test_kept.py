"""Responses of the data as tokens: the boundary is where the prompt ends, and templates without one are refused."""

import copy
from dataclasses import replace

import pytest

from drafthead.data.prompts import Prompt, cut, parse_messages, prompt_id
from drafthead.data.rendering import (
    ALTERED,
    IS_CALL,
    NO_RESPONSE,
    NO_STOP,
    UNSTABLE,
    KeptResponses,
    Renderer,
    UnrenderableError,
)

CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, you."}


def keep(tokenizer, stops, prompt, effort="low") -> tuple[str, str]:
    """Prompt and kept response as text."""
    render = Renderer(tokenizer)
    prompt_ids = render(prompt, effort)
    kept = KeptResponses(render, tokenizer, stops)(prompt, prompt_ids, effort)
    return tokenizer.decode(prompt_ids), tokenizer.decode(kept)


def with_template(tokenizer, template):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def prompt(*messages, **response) -> Prompt:
    (messages, response), *_ = cut(parse_messages([*messages, {"role": "assistant", **response}]), "last")
    return Prompt(prompt_id(messages), "local", "chat", messages, response=response)


def test_the_response_is_what_the_target_would_have_generated(tokenizer):
    given = prompt(USER, ASSISTANT, USER, content="Good day.", reasoning_content="Again?")
    before, response = keep(tokenizer, {2, 8}, given)
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


BARE = Prompt("a", "local", "chat", (USER,))


@pytest.mark.parametrize(
    ("template", "stops", "given", "reason"),
    [
        # what comes first depends on what follows
        ("{{ messages | length }}" + CHATML, {6}, prompt(USER, content="1. First"), UNSTABLE),
        # " " and "1" merge
        (
            CHATML.replace("}}\n{{", "}} {{").replace("assistant\n", "assistant "),
            {6},
            prompt(USER, content="1. First"),
            UNSTABLE,
        ),
        (CHATML, {2}, prompt(USER, content="Yes."), NO_STOP),
        (CHATML.replace("m.content", "m.content | upper"), {6}, prompt(USER, content="Yes."), ALTERED),
        (CHATML, {6}, prompt(USER, content="A thought ends at </think> there."), ALTERED),
        (CHATML, {6}, BARE, NO_RESPONSE),
        (CHATML, {6}, Prompt("x", "mlperf", "long", (), prompt_ids=(5, 6)), NO_RESPONSE),
        (CHATML, {6}, replace(BARE, response={**ASSISTANT, "tool_calls": [{}]}), IS_CALL),
    ],
)
def test_a_response_that_cannot_be_kept_has_a_reason(tokenizer, template, stops, given, reason):
    with pytest.raises(UnrenderableError) as caught:
        keep(with_template(tokenizer, template), stops, given)
    assert caught.value.reason == reason
