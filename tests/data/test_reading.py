"""Generated ids read back as the message that a client gets, for Harmony and for plain templates."""

import copy

import pytest

from drafthead.data.rendering import ParsedResponse, response_parser

CHANNELS = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        (CHANNELS + "Hé, 你好 <b>\n<|return|>", ParsedResponse("Hé, 你好 <b>\n", "Think.")),
        (CHANNELS + "cut o", ParsedResponse("cut o", "Think.")),
        ("<|channel|>analysis<|message|>Think", ParsedResponse("", "Think")),
        ("<|channel|>analysis<|message|>Think.<|end|><|start|>assi", ParsedResponse("", "Think.")),
        ("<|channel|>final<|message|>Yes.<|return|>", ParsedResponse("Yes.")),
        (
            "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
            ParsedResponse("", is_call=True),
        ),
        ("no format at all", ParsedResponse("")),
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
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    assert response_parser(plain)(plain(text, add_special_tokens=False)["input_ids"]) == parsed
