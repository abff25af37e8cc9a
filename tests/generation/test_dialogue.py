"""The turns of a conversation, the history of each, the flags of a response, and what is drawn for it."""

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from tqdm import tqdm

from drafthead.config.recipe import ResponsesConfig
from drafthead.data.prompts import Prompt, prompt_id
from drafthead.data.rendering import ParsedResponse
from drafthead.engine.generate import Generation
from drafthead.generation.dialogue import REFUSED, TRUNCATED, draw_sampling, flags_of, make_responses, turns_of

ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}


def prompt(spelled: str) -> Prompt:
    """ "u1 a1 u2" as a prompt."""
    messages = tuple({"role": ROLES[word[0]], "content": word} for word in spelled.split())
    return Prompt(prompt_id(messages), "local", "chat", messages)


def settings(**more) -> ResponsesConfig:
    return ResponsesConfig(max_tokens=8, **more)


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
    asked: list[str] = []

    def render(prompt: Prompt, effort: str) -> list[int]:
        assert all(message.keys() == {"role", "content"} for message in prompt.messages), "a thought is sent back"
        asked.append(" ".join(m["content"] for m in prompt.messages))
        return [len(asked)]

    rules: Any = SimpleNamespace(
        settings=settings(history="regenerated" if turn_by_turn else "given"),
        seed=0, continuation=0, max_model_len=99, data_responses=None, render=render,
        read=lambda ids: ParsedResponse(f"A{len(asked)}", thinking="never seen again"),
        tokenizer=SimpleNamespace(decode=lambda ids, skip_special_tokens: "A"),
    )  # fmt: skip
    engine: Any = SimpleNamespace(generate=lambda requests, bar: [Generation([1], "stop")] * len(requests))
    one = prompt(conversation)
    responses, left_out = make_responses(rules, engine, [one], tqdm(disable=True))
    assert asked == histories
    assert not left_out
    ids = [one.id] if len(histories) == 1 else [f"{one.id}-{n + 1}" for n in range(len(histories))]
    assert [response.id for response in responses] == ids
    assert [response.prompt_ids for response in responses] == [[n + 1] for n in range(len(histories))]
    assert len(turns_of(one, turn_by_turn)) == len(histories)


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("  i’m  sorry, but I cannot do this", True),
        ("I'm sorry to hear that. Here is what you can do.", False),
        ("The function cannot fail: I can't help with that is a string.", False),
        ("", False),
    ],
)
def test_a_refusal_is_known_by_its_opening(text, refused):
    assert flags_of(ParsedResponse(text), Generation([1], "stop")) == [REFUSED] * refused
    assert flags_of(ParsedResponse(text), Generation([1], "length")) == [TRUNCATED, *[REFUSED] * refused]


def test_one_flag_of_those_to_be_dropped_is_enough():
    strict = settings(drop=(TRUNCATED,))
    assert [strict.drops(flags) for flags in ([TRUNCATED, REFUSED], [REFUSED], [])] == [True, False, False]


IDS = [f"{i:016x}" for i in range(2000)]


def test_the_draw_follows_from_seed_and_prompt_alone_and_the_sampling_seed_from_the_turn():
    wide = settings(temperature={0.5: 1, 1.0: 1}, reasoning_efforts=("low", "high"))
    drawn, again, other = ([draw_sampling(wide, seed, i, 0, greedy=False) for i in IDS] for seed in (0, 0, 1))
    assert drawn == again != other
    assert len({s.seed for s in drawn}) == len(IDS)
    later = [draw_sampling(wide, 0, i, 1, greedy=False) for i in IDS]
    assert all(b == a._replace(seed=b.seed) and b.seed != a.seed for a, b in zip(drawn, later, strict=True))
    assert draw_sampling(wide, 0, IDS[7], 0, greedy=True).temperature == 0.0


def test_shares_are_the_weights_and_the_draws_are_independent():
    wide = settings(temperature={0.0: 1, 0.7: 3}, reasoning_efforts={"low": 1, "high": 4})
    pairs = Counter((s.temperature, s.effort) for s in (draw_sampling(wide, 0, i, 0, greedy=False) for i in IDS))
    expected = {(t, e): a * b / 20 for t, a in ((0.0, 1), (0.7, 3)) for e, b in (("low", 1), ("high", 4))}
    assert set(pairs) == set(expected)
    for pair, share in expected.items():
        # Four standard deviations of a share over 2,000 draws; the draws are fixed, so this never flickers.
        assert abs(pairs[pair] / len(IDS) - share) < 4 * (share * (1 - share) / len(IDS)) ** 0.5
