"""Responses of the data as tokens: the boundary is where the prompt ends, and templates without one are refused."""

import copy

import pytest
from openai_harmony import (
    Conversation,
    HarmonyEncodingName,
    Message,
    RenderConversationConfig,
    Role,
    load_harmony_encoding,
)

from drafthead.data.conversations import cut, parse_messages
from drafthead.data.kept import ALTERED, IS_CALL, NO_RESPONSE, NO_STOP, UNSTABLE, KeptResponses
from drafthead.data.prompts import Prompt, prompt_id
from drafthead.data.rendering import Renderer, UnrenderableError

CHATML = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
USER, ASSISTANT = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello, you."}


def kept_responses(tokenizer, stops) -> KeptResponses:
    return KeptResponses(Renderer(tokenizer), tokenizer, stops)


def with_template(tokenizer, template):
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def prompt(*messages, **response) -> Prompt:
    (messages, response), *_ = cut(parse_messages([*messages, {"role": "assistant", **response}]), "last")
    return Prompt(prompt_id(messages), "local", "chat", messages, response=response)


def test_the_response_is_what_the_target_would_have_generated(tokenizer):
    keep = kept_responses(tokenizer, {2, 8})
    kept = keep(prompt(USER, ASSISTANT, USER, content="Good day.", reasoning_content="Again?"), "low")
    assert tokenizer.decode(kept.prompt_ids).endswith(
        "Hello, you.<|end|><|start|>user<|message|>Hi<|end|><|start|>assistant"
    )
    assert "Reasoning: low" in tokenizer.decode(kept.prompt_ids)
    written = (
        "<|channel|>analysis<|message|>Again?<|end|><|start|>assistant<|channel|>final<|message|>Good day.<|return|>"
    )
    assert tokenizer.decode(kept.response_ids) == written


def test_harmony_is_what_openai_harmony_writes(tokenizer):
    """The embedded template's response, and the other implementation of the format, agree text for text."""
    kept = kept_responses(tokenizer, {2, 8})(prompt(USER, content="Good day.", thinking="Hm."), "medium")
    encoding = load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    messages = [
        Message.from_role_and_content(Role.ASSISTANT, text).with_channel(channel)
        for channel, text in (("analysis", "Hm."), ("final", "Good day."))
    ]
    config = RenderConversationConfig(auto_drop_analysis=False)
    written = encoding.decode(encoding.render_conversation_for_training(Conversation(messages=messages), config=config))
    assert "<|start|>assistant" + tokenizer.decode(kept.response_ids) == written


def test_what_follows_the_stop_token_is_not_generated(tokenizer):
    chatml = with_template(tokenizer, CHATML)
    kept = kept_responses(chatml, {6})(prompt(USER, content="Good day."), "low")
    assert chatml.decode(kept.prompt_ids) == "<|start|>user\nHi<|end|>\n<|start|>assistant\n"
    assert chatml.decode(kept.response_ids) == "Good day.<|end|>"  # the template adds a line break


def test_a_thought_that_the_template_writes_is_generated_too(tokenizer):
    """As Qwen 3 does: an empty thought before the last response, none before earlier ones."""
    thought = "{% if loop.last and m.role == 'assistant' %}<think>\n\n</think>\n\n{% endif %}{{ m.content }}"
    qwen = with_template(tokenizer, CHATML.replace("{{ m.content }}", thought))
    kept = kept_responses(qwen, {6})(prompt(USER, ASSISTANT, USER, content="Good day."), "low")
    assert "think" not in qwen.decode(kept.prompt_ids)
    assert qwen.decode(kept.response_ids) == "<think>\n\n</think>\n\nGood day.<|end|>"
    assert kept.parsed.content.strip() == "Good day."


@pytest.mark.parametrize(
    ("template", "stops", "reason"),
    [
        ("{{ messages | length }}" + CHATML, {6}, UNSTABLE),  # what comes first depends on what follows
        (CHATML.replace("}}\n{{", "}} {{").replace("assistant\n", "assistant "), {6}, UNSTABLE),  # " " and "1" merge
        (CHATML, {2}, NO_STOP),
        (CHATML.replace("m.content", "m.content | upper"), {6}, ALTERED),
    ],
)
def test_a_template_without_stable_boundaries_keeps_nothing(tokenizer, template, stops, reason):
    with pytest.raises(UnrenderableError, match=reason):
        kept_responses(with_template(tokenizer, template), stops)(prompt(USER, content="1. First"), "low")


def test_a_response_that_cannot_be_kept_has_a_reason(tokenizer):
    chatml = kept_responses(with_template(tokenizer, CHATML), {6})
    bare = Prompt(prompt_id([USER]), "local", "chat", (USER,))
    call = Prompt(bare.id, "local", "chat", (USER,), response={**ASSISTANT, "tool_calls": [{}]})
    ids = Prompt("x", "mlperf", "long", (), prompt_ids=(5, 6))
    for unusable, reason in ((bare, NO_RESPONSE), (ids, NO_RESPONSE), (call, IS_CALL)):
        with pytest.raises(UnrenderableError) as caught:
            chatml(unusable, "low")
        assert caught.value.reason == reason


def test_a_response_that_parses_as_something_else_is_left_out(tokenizer):
    chatml = kept_responses(with_template(tokenizer, CHATML), {6})
    with pytest.raises(UnrenderableError) as caught:
        chatml(prompt(USER, content="A thought ends at </think> there."), "low")
    assert caught.value.reason == ALTERED
