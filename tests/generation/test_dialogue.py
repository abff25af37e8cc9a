"""Which questions a conversation has, what each is asked on top of, and what becomes of an answer by rule."""

import pytest

from drafthead.config.responses import ResponsesConfig
from drafthead.data.prompts import Prompt, prompt_id
from drafthead.data.reading import ParsedResponse
from drafthead.generation.responses.dialogue import open_dialogue
from drafthead.generation.responses.judging import REFUSED, TRUNCATED, dropped, is_refusal, judge

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def prompt(spelled: str) -> Prompt:
    """ "u1 a1 u2" as a prompt."""
    messages = tuple({"role": ROLES[word[0]], "content": word} for word in spelled.split())
    return Prompt(prompt_id(messages), "local", "chat", messages)


def spelled(messages) -> str:
    return " ".join(m["content"] for m in messages)


@pytest.mark.parametrize(
    ("conversation", "asked"),
    [
        ("u1", ["u1"]),
        ("s u1 a1 u2 a2 u3", ["s u1", "s u1 A1 u2", "s u1 A1 u2 A2 u3"]),
        ("u1 a1 a2 u2 u3", ["u1", "u1 A1 u2 u3"]),
        ("a0 u1 a1 u2", ["a0 u1", "a0 u1 A1 u2"]),
        ("u1 a1 t1 a2 u2", ["u1 a1 t1 a2 u2"]),  # a tool's result answers the call of whoever made it
    ],
)
def test_every_question_is_asked_on_top_of_the_targets_own_answers(conversation, asked):
    opened = open_dialogue(prompt(conversation), turn_by_turn=True)
    found, ids, dialogue = [], [], opened
    while dialogue:
        assert dialogue.turns_left == len(asked) - len(found)
        found.append(spelled(dialogue.question.messages))
        ids.append(dialogue.id)
        dialogue = dialogue.after(ParsedResponse(f"A{len(found)}", thinking="never seen again"))
    assert found == asked
    name = opened.prompt.id
    assert ids == ([name] if len(asked) == 1 else [f"{name}-{n}" for n in range(1, len(asked) + 1)])


def test_a_given_history_is_one_question():
    dialogue = open_dialogue(prompt("u1 a1 u2"), turn_by_turn=False)
    assert spelled(dialogue.question.messages) == "u1 a1 u2"
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


def test_other_openings_can_be_configured():
    settings = ResponsesConfig(max_tokens=1, refusal_openings=("Es tut mir leid",))
    assert judge(settings, ParsedResponse("Es tut mir leid, nein."), [1], "stop") == [REFUSED]
    assert judge(settings, ParsedResponse("I'm sorry, but I can't."), [1], "length") == [TRUNCATED]


def test_one_flag_that_a_recipe_drops_is_enough():
    settings = ResponsesConfig(max_tokens=1, on_truncated="drop")
    assert dropped(settings, [TRUNCATED, REFUSED])
    assert not dropped(settings, [REFUSED])
    assert not dropped(settings, [])
