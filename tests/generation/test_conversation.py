"""Conversations from data sets' many spellings: what comes out is a prompt, and what cannot be one has a reason."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthead.generation.sources.conversation import ROLES, RowError, ask, cut, parse_messages


def say(*pairs: tuple[str, str]) -> list[dict]:
    return [{"role": role, "content": text} for role, text in pairs]


@pytest.mark.parametrize(("spelling", "role"), ROLES.items())
def test_every_spelling_of_a_role_is_read(spelling, role):
    rows = [
        {"from": "human", "value": "hello"},
        {"from": spelling.upper(), "value": "x"},
        {"role": "user", "content": "y"},
    ]
    assert parse_messages(rows)[1] == {"role": role, "content": "x"}


def test_from_value_and_role_content_say_the_same():
    shared = [{"from": "system", "value": "s"}, {"from": "human", "value": "u"}, {"from": "gpt", "value": "a"}]
    assert parse_messages(shared) == tuple(say(("system", "s"), ("user", "u"), ("assistant", "a")))


def test_a_chat_cut_in_pieces_starts_at_its_first_question():
    assert parse_messages(say(("assistant", "end of it"), ("user", "u"))) == tuple(say(("user", "u")))
    assert parse_messages(say(("system", ""), ("user", "u"))) == tuple(say(("user", "u")))


def test_tool_calls_are_kept_and_parts_of_text_joined():
    call = [{"type": "function", "function": {"name": "f", "arguments": "{}"}}]
    rows = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": call},
        {"role": "function", "content": "1", "name": "f", "tool_call_id": "c"},
    ]
    parsed = parse_messages(rows)
    assert parsed[0]["content"] == "ab"
    assert parsed[1] == {"role": "assistant", "content": "", "tool_calls": call}
    assert parsed[2] == {"role": "tool", "content": "1", "name": "f", "tool_call_id": "c"}
    assert cut(parsed, "last") == [parsed]  # the target speaks after a tool, too


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "no list of messages"),
        ("hello", "no list of messages"),
        (["hello"], "not an object"),
        (say(("narrator", "x")), "unknown role 'narrator'"),
        ([{"content": "x"}], "unknown role 'None'"),
        (say(("user", " \n")), "an empty user message"),
        (say(("user", "u"), ("assistant", ""), ("user", "u")), "an empty assistant message"),
        (say(("system", "s")), "no user message"),
        (say(("user", "\ud800")), "lone surrogate"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}], "not text"),
    ],
)
def test_what_is_no_conversation_has_a_reason(rows, reason):
    with pytest.raises(RowError, match=reason):
        parse_messages(rows)


def test_the_first_the_last_or_all_questions_become_prompts():
    chat = say(("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4"))
    assert cut(chat, "first") == [tuple(chat[:1])]
    assert cut(chat, "last") == [tuple(chat[:3])]
    assert cut(chat, "all") == [tuple(chat[:1]), tuple(chat[:3])]
    late = say(("user", "1"), ("system", "2"))  # found by the property below
    assert cut(late, "last") == [tuple(late[:1])]


def test_a_megabyte_of_text_is_kept():
    text = "x" * 2**20
    assert ask(text)[0]["content"] == text


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
roles = st.sampled_from([*ROLES, "narrator", "", None, "Human "])
contents = st.text(max_size=20) | st.just("\udfff") | json_values
messages = st.one_of(
    st.fixed_dictionaries(
        {"role": roles, "content": contents}, optional={"tool_calls": json_values, "name": json_values}
    ),
    st.fixed_dictionaries({"from": roles, "value": contents}),
    json_values,
)


@settings(max_examples=300)
@given(st.lists(messages, max_size=6) | json_values)
def test_anything_is_a_conversation_or_has_a_reason(rows):
    try:
        parsed = parse_messages(rows)
    except RowError as error:
        str(error).encode()  # a reason is printed
        return
    assert parse_messages(parsed) == parsed
    for message in parsed:
        assert message["role"] in set(ROLES.values())
        message["content"].encode()
        assert message["content"].strip() or message.get("tool_calls")
    cuts = cut(parsed, "all")
    assert all(prompt[-1]["role"] in ("user", "tool") and parsed[: len(prompt)] == prompt for prompt in cuts)
    assert cuts[:1] == cut(parsed, "first")
    assert cuts[-1:] == cut(parsed, "last")
    assert cuts
