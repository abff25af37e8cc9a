"""Generated ids read back as the message that a client gets, for Harmony and for plain templates."""

import copy

import pytest
from transformers import AutoTokenizer

from drafthead.config import load_recipe
from drafthead.data.reading import Said, answer_reader

CHANNELS = "<|channel|>analysis<|message|>Think.<|end|><|start|>assistant<|channel|>final<|message|>"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CHANNELS + "Hé, 你好 <b>\n<|return|>", Said("Hé, 你好 <b>\n", "Think.")),
        (CHANNELS + "cut o", Said("cut o", "Think.")),
        ("<|channel|>analysis<|message|>Think", Said("", "Think")),
        ("<|channel|>analysis<|message|>Think.<|end|><|start|>assi", Said("", "Think.")),
        ("<|channel|>final<|message|>Yes.<|return|>", Said("Yes.")),
        ("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>", Said("", is_call=True)),
        ("no format at all", Said("")),
        ("<|start|><|start|>", Said("")),
        ("", Said("")),
    ],
)
def test_what_harmony_channels_say_is_told_apart(tokenizer, text, said):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert answer_reader(tokenizer)(ids) == said


def test_a_message_goes_back_without_its_thought(tokenizer):
    ids = tokenizer(CHANNELS + "Yes.<|return|>", add_special_tokens=False)["input_ids"]
    assert answer_reader(tokenizer)(ids).message() == {"role": "assistant", "content": "Yes."}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("Yes.<|end|>", Said("Yes.")),
        ("<think>\nHm.\n</think>\n\nYes.<|end|>", Said("\n\nYes.", "\nHm.\n")),
        ("Hm.</think>Yes.<|end|>", Said("Yes.", "Hm.")),  # the prompt opened the thought
    ],
)
def test_a_plain_template_says_answer_and_thought(tokenizer, text, said):
    plain = copy.deepcopy(tokenizer)
    plain.chat_template = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    assert answer_reader(plain)(plain(text, add_special_tokens=False)["input_ids"]) == said
