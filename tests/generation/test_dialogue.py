"""The turns of a conversation, the history of each, the flags of a response, and what is drawn for it."""

from collections import Counter

import pytest

from drafthead.config.recipe import ResponsesConfig
from drafthead.data.prompts import Prompt, prompt_id
from drafthead.data.rendering import ParsedResponse
from drafthead.engine.generate import Generation
from drafthead.generation.dialogue import REFUSED, TRUNCATED, draw_sampling, flags_of, is_refusal, open_dialogue

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def prompt(spelled: str) -> Prompt:
    """ "u1 a1 u2" as a prompt."""
    messages = tuple({"role": ROLES[word[0]], "content": word} for word in spelled.split())
    return Prompt(prompt_id(messages), "local", "chat", messages)


def spelled(messages) -> str:
    return " ".join(m["content"] for m in messages)


@pytest.mark.parametrize(
    ("conversation", "turn_by_turn", "histories"),
    [
        ("u1", True, ["u1"]),
        ("s u1 a1 u2 a2 u3", True, ["s u1", "s u1 A1 u2", "s u1 A1 u2 A2 u3"]),
        ("u1 a1 a2 u2 u3", True, ["u1", "u1 A1 u2 u3"]),
        ("a0 u1 a1 u2", True, ["a0 u1", "a0 u1 A1 u2"]),
        ("u1 a1 t1 a2 u2", True, ["u1 a1 t1 a2 u2"]),  # a tool's result belongs to the call of whoever made it
        ("u1 a1 u2", False, ["u1 a1 u2"]),  # a given history
    ],
)
def test_every_turn_follows_the_targets_own_responses(conversation, turn_by_turn, histories):
    opened = open_dialogue(prompt(conversation), turn_by_turn)
    found, ids, dialogue = [], [], opened
    while dialogue:
        assert dialogue.turns_left == len(histories) - len(found)
        found.append(spelled(dialogue.messages))
        ids.append(dialogue.id)
        dialogue = dialogue.after(ParsedResponse(f"A{len(found)}", thinking="never seen again"))
    assert found == histories
    name = opened.prompt.id
    assert ids == ([name] if len(histories) == 1 else [f"{name}-{n}" for n in range(1, len(histories) + 1)])


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


IDS = [f"{i:016x}" for i in range(2000)]


def settings(**more) -> ResponsesConfig:
    return ResponsesConfig(max_tokens=8, **more)


def test_the_draw_follows_from_seed_and_prompt_alone():
    wide = settings(temperature={0.5: 1, 1.0: 1}, reasoning_efforts=("low", "high"))
    drawn = [draw_sampling(wide, i, 0, greedy=False) for i in IDS]
    assert drawn == [draw_sampling(wide, i, 0, greedy=False) for i in IDS]
    other = wide.model_copy(update={"seed": 1})
    assert drawn != [draw_sampling(other, i, 0, greedy=False) for i in IDS]
    assert len({s.seed for s in drawn}) == len(IDS)


def test_shares_are_the_weights_and_the_draws_are_independent():
    wide = settings(temperature={0.0: 1, 0.7: 3}, reasoning_efforts={"low": 1, "high": 4})
    pairs = Counter((s.temperature, s.effort) for s in (draw_sampling(wide, i, 0, greedy=False) for i in IDS))
    expected = {(t, e): a * b / 20 for t, a in ((0.0, 1), (0.7, 3)) for e, b in (("low", 1), ("high", 4))}
    assert set(pairs) == set(expected)
    for pair, share in expected.items():
        # Four standard deviations of a share over 2,000 draws; the draws are fixed, so this never flickers.
        assert abs(pairs[pair] / len(IDS) - share) < 4 * (share * (1 - share) / len(IDS)) ** 0.5


def test_turns_share_temperature_and_effort_but_not_the_seed():
    wide = settings(temperature={0.5: 1, 1.0: 1}, reasoning_efforts=("low", "medium", "high"))
    first, second = (draw_sampling(wide, IDS[7], turn, greedy=False) for turn in (0, 1))
    assert (first.temperature, first.effort) == (second.temperature, second.effort)
    assert first.seed != second.seed
    assert draw_sampling(wide, IDS[7], 0, greedy=True).temperature == 0.0
