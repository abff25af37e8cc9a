"""The turns of a conversation, the history of each, and the flags of a response."""

import pytest

from drafthead.config.responses import ResponsesConfig
from drafthead.data.prompts import Prompt, prompt_id
from drafthead.data.reading import ParsedResponse
from drafthead.engine.generate import Generation
from drafthead.generation.dialogue import REFUSED, TRUNCATED, flags_of, is_refusal, open_dialogue

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def prompt(spelled: str) -> Prompt:
    """ "u1 a1 u2" as a prompt."""
    messages = tuple({"role": ROLES[word[0]], "content": word} for word in spelled.split())
    return Prompt(prompt_id(messages), "local", "chat", messages)


def spelled(messages) -> str:
    return " ".join(m["content"] for m in messages)


@pytest.mark.parametrize(
    ("conversation", "histories"),
    [
        ("u1", ["u1"]),
        ("s u1 a1 u2 a2 u3", ["s u1", "s u1 A1 u2", "s u1 A1 u2 A2 u3"]),
        ("u1 a1 a2 u2 u3", ["u1", "u1 A1 u2 u3"]),
        ("a0 u1 a1 u2", ["a0 u1", "a0 u1 A1 u2"]),
        ("u1 a1 t1 a2 u2", ["u1 a1 t1 a2 u2"]),  # a tool's result belongs to the call of whoever made it
    ],
)
def test_every_turn_follows_the_targets_own_responses(conversation, histories):
    opened = open_dialogue(prompt(conversation), turn_by_turn=True)
    found, ids, dialogue = [], [], opened
    while dialogue:
        assert dialogue.turns_left == len(histories) - len(found)
        found.append(spelled(dialogue.messages))
        ids.append(dialogue.id)
        dialogue = dialogue.after(ParsedResponse(f"A{len(found)}", thinking="never seen again"))
    assert found == histories
    name = opened.prompt.id
    assert ids == ([name] if len(histories) == 1 else [f"{name}-{n}" for n in range(1, len(histories) + 1)])


def test_a_given_history_is_one_turn():
    dialogue = open_dialogue(prompt("u1 a1 u2"), turn_by_turn=False)
    assert spelled(dialogue.messages) == "u1 a1 u2"
    assert dialogue.after(ParsedResponse("A2")) is None
    assert dialogue.id == dialogue.prompt.id


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("I'm sorry, but I can't help with that.", True),
        ("  i’m  sorry, but I cannot do this", True),
        ("I am unable to say.", True),
        ("I'm sorry to hear that. Here is what you can do.", False),
        ("The function cannot fail: I can't help with that is a string.", False),
        ("", False),
    ],
)
def test_a_refusal_is_known_by_its_opening(text, refused):
    assert is_refusal(text, ResponsesConfig(max_tokens=1).refusal_openings) == refused


def test_a_response_has_the_flags_that_the_settings_find():
    settings = ResponsesConfig(max_tokens=1, refusal_openings=("Es tut mir leid",), drop=("truncated",))
    assert flags_of(settings, ParsedResponse("Es tut mir leid, nein."), Generation([1], "stop")) == [REFUSED]
    assert flags_of(settings, ParsedResponse("I'm sorry, but I can't."), Generation([1], "length")) == [TRUNCATED]
    assert settings.drops([TRUNCATED, REFUSED])  # one is enough
    assert not settings.drops([REFUSED])
    assert not settings.drops([])
