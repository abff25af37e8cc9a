"""Conversations from data sets' many spellings: what comes out is a prompt, and what cannot be one has a reason."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafthead.data.prompts import ROLES, Conversation, RowError, parse_messages, split_turns, token_ids


def chat(*pairs: tuple[str, str]) -> tuple[dict, ...]:
    return tuple({"role": role, "content": text} for role, text in pairs)


USER, SYSTEM = chat(("user", "u")), chat(("system", "s"))
CALL = [{"type": "function", "function": {"name": "f", "arguments": {"city": "Paris"}}}]
AS_TEXT = [{"type": "function", "function": {"name": "f", "arguments": '{"city": "Paris"}'}}]  # as OpenAI stores it


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"from": "HUMAN", "value": "u"}], USER),
        ('[{"role": "user", "content": "u"}]', USER),  # a column of a CSV file
        (chat(("assistant", "end of it"), ("user", "u")), USER),  # a piece of a chat
        (chat(("system", " "), ("user", "u")), USER),
        (chat(("assistant", "hello"), ("system", "s"), ("user", "u")), SYSTEM + USER),
        ([{"role": "user", "content": [{"type": "text", "text": "a"}, {"text": "b"}]}], chat(("user", "ab"))),
        (
            [*USER, {"role": "assistant", "tool_calls": CALL}],
            (*USER, {**chat(("assistant", ""))[0], "tool_calls": CALL}),
        ),
        *(
            (
                [*USER, {"role": "assistant", "content": "a", **message}],
                (*USER, {"role": "assistant", "content": "a", **normalised}),
            )
            for message, normalised in (
                ({"tool_calls": AS_TEXT}, {"tool_calls": CALL}),
                ({"tool_calls": json.dumps(AS_TEXT)}, {"tool_calls": CALL}),
                ({"function_call": AS_TEXT[0]["function"]}, {"tool_calls": CALL}),
                ({"tool_calls": [{"name": "f"}]}, {"tool_calls": [{"name": "f", "arguments": {}}]}),
                ({"tool_calls": json.dumps(AS_TEXT[0])}, {"tool_calls": CALL}),
                ({"tool_calls": [AS_TEXT[0]["function"]]}, {"tool_calls": [CALL[0]["function"]]}),
                ({"tool_calls": "[]", "function_call": "none"}, {}),
                ({"tool_calls": "", "function_call": {"name": None, "arguments": None}}, {}),
                ({"tool_calls": []}, {}),
            )
        ),
        ([*USER, {"role": "tool", "content": ""}], (*USER, {"role": "tool", "content": ""})),  # of mkdir
        (
            [*USER, {"role": "gpt", "content": "\n<think>\nt\n</think>\n\na"}],
            (*USER, {"role": "assistant", "content": "a", "thinking": "\nt\n"}),
        ),
        ([*USER, {"role": "gpt", "content": "<think>\n</think>\n\na"}], (*USER, {"role": "assistant", "content": "a"})),
        (
            [*USER, {"role": "gpt", "content": "<think>t</think>\n", "tool_calls": CALL}],
            (*USER, {"role": "assistant", "content": "", "thinking": "t", "tool_calls": CALL}),
        ),
        (
            [*USER, {"role": "function", "content": "1", "name": "f", "tool_call_id": "c"}],
            (*USER, {"role": "tool", "content": "1", "name": "f", "tool_call_id": "c"}),
        ),
        *(
            (
                [*USER, {"role": "gpt", "content": "a", key: learned}],
                (*USER, {"role": "assistant", "content": "a", **marked}),
            )
            for key in ("weight", "train", "trainable", "loss", "loss_mask")
            for learned, marked in ((0, {"weight": 0}), (False, {"weight": 0}), (1, {}), (True, {}), (None, {}))
        ),
        ([*USER, {"role": "assistant", "content": None, "refusal": "no"}], (*USER, *chat(("assistant", "no")))),
        ([{"role": "user", "content": "u", "name": "n", "weight": 0}], ({**USER[0], "name": "n"},)),
        (
            [*USER, {"role": "gpt", "content": "a", "reasoning_content": "t"}],
            (*USER, {"role": "assistant", "content": "a", "thinking": "t"}),
        ),
    ],
)
def test_messages_are_normalised(rows, expected):
    assert parse_messages(rows) == expected


@pytest.mark.parametrize(
    ("rows", "reason"),
    [
        ([], "list"),
        (chat(("user", "u"), ("assistant", ""), ("user", "u")), "assistant"),
        (SYSTEM, "no user"),
        ([{"role": "user", "content": [{"image_url": "x"}]}], "not text"),
        ([{"role": "assistant", "tool_calls": "{"}], "JSON"),
        *(
            ([*USER, {"role": "assistant", "content": "a", **calls}], reason)
            for calls, reason in (
                ({"tool_calls": [{"function": {"name": "f", "arguments": "Paris"}}]}, "arguments"),
                ({"tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1'}}]}, "arguments"),
                ({"tool_calls": [{"name": "f", "arguments": [1]}]}, "arguments"),
                ({"tool_calls": ["f"]}, "name"),
                ({"tool_calls": [{"function": {"arguments": "{}"}}]}, "name"),
                ({"function_call": {"name": "f", "arguments": "{}"}, "tool_calls": CALL}, "function_call"),
                ({"weight": 0.5}, "weight"),
                ({"loss_mask": [0, 1]}, "loss_mask"),
            )
        ),
    ],
)
def test_what_is_no_conversation_has_a_reason(rows, reason):
    with pytest.raises(RowError, match=reason):
        parse_messages(rows)


def test_what_is_changed_is_listed_and_keys_that_nothing_reads_are_refused_by_name():
    repairs: list[str] = []
    rows = [*chat(("assistant", "x"), ("system", "")), *USER, {"role": "gpt", "tool_calls": [{"name": "f"}]}]
    parse_messages(rows, True, repairs)
    assert len(repairs) == len(set(repairs)) == 3
    for bad, named in (({"text": "u"}, "'text'"), ({"content": "u", "value": "v"}, "content, value")):
        with pytest.raises(RowError, match=named):
            parse_messages([{"role": "user", **bad}], True)
    assert parse_messages([{**USER[0], "markdown": "x"}]) == USER  # of a public data set


def test_the_first_the_last_or_all_questions_become_prompts():
    u1, a1, u2, a2 = messages = chat(("user", "1"), ("assistant", "2"), ("user", "3"), ("assistant", "4"))
    assert split_turns(messages, "first") == [((u1,), a1)]
    assert split_turns(messages, "last") == [((u1, a1, u2), a2)]
    assert split_turns(messages, "all") == [((u1,), a1), ((u1, a1, u2), a2)]
    assert split_turns(messages[:3], "last") == [((u1, a1, u2), None)]
    tool = {"role": "tool", "content": "1"}  # the target responds to a tool, too
    assert split_turns((u1, a1, tool), "last") == [((u1, a1, tool), None)]
    late = chat(("user", "1"), ("system", "2"))  # found by the property below
    assert split_turns(late, "last") == [(late[:1], None)]


def test_a_thought_is_kept_in_the_response_and_left_out_of_the_history():
    thoughtful = {"role": "assistant", "content": "a", "thinking": "t"}
    (_, first), (history, _) = split_turns((*USER, thoughtful, *USER), "all")
    assert first == thoughtful
    unlearned = {"role": "assistant", "content": "a", "weight": 0, "finish_reason": "length"}
    assert split_turns((*USER, unlearned, *USER), "all") == [
        (USER, unlearned),
        ((*USER, *chat(("assistant", "a")), *USER), None),
    ]
    assert history[1] == {"role": "assistant", "content": "a"}


def test_token_ids_are_whole_numbers_of_32_bits():
    assert token_ids([3, 1]) == token_ids("[3, 1]") == (3, 1)
    for bad in ([], [-1], [1.0], [True], [2**31], "12", "x", None):
        with pytest.raises(RowError):
            token_ids(bad)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.just("\ud800"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
roles = st.sampled_from([*ROLES, "narrator", "", None, "Human "])
contents = st.text(max_size=20) | st.just("\udfff") | json_values
messages = st.one_of(
    st.fixed_dictionaries(
        {"role": roles, "content": contents},
        optional=dict.fromkeys(("tool_calls", "name", "weight", "finish_reason"), json_values),
    ),
    st.fixed_dictionaries({"from": roles, "value": contents}),
    json_values,
)


@settings(max_examples=300)
@given(st.lists(messages, max_size=6) | json_values)
def test_anything_is_a_conversation_or_has_a_reason(rows):
    try:
        parsed = Conversation(parse_messages(rows), "").messages
    except RowError as error:
        str(error).encode()  # a reason is printed
        return
    assert parse_messages(parsed) == parsed
    for message in parsed:
        assert message["role"] in set(ROLES.values())
        message["content"].encode()
        assert message["content"].strip() or message.get("tool_calls") or message["role"] == "tool"
    cuts = split_turns(parsed, "all")
    assert all(prompt[-1]["role"] in ("user", "tool") and parsed[: len(prompt)] == prompt for prompt, _ in cuts)
    assert cuts[:1] == split_turns(parsed, "first")
    assert cuts[-1:] == split_turns(parsed, "last")
    assert cuts
