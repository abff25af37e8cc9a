"""What a server may do wrong, and what is said then: a small HTTP server that misbehaves on purpose.

A server that does everything right, `vllm serve`, is asked in tests/generation/test_turns.py.
"""

from typing import Any

import pytest

from drafthead.engine import remote
from drafthead.engine.answering import Ask
from drafthead.engine.server import ServerError
from tests.engine.little_server import WORDS, Reply, honest_reply, serving


@pytest.fixture
def honest(tokenizer) -> Reply:
    return honest_reply(tokenizer)


def test_answers_come_in_the_order_of_the_prompts(tokenizer, honest):
    def echo(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status, answer = honest(body)
        if body["max_tokens"] == 1:
            answer["choices"][0]["token_ids"] = body["prompt"]
        return status, answer

    with serving(echo) as recipe, remote.server_answerer(recipe, tokenizer) as answerer:
        asks = [Ask([7, i], 1, 0.7, i) for i in range(100)]
        assert [answer.token_ids for answer in answerer.answer(asks)] == [ask.prompt_ids for ask in asks]
        assert answerer.made_by["model"] == "m"


def test_an_overloaded_server_is_asked_again(tokenizer, honest):
    refusals = iter([503, 429])

    def busy(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status = next(refusals, None)
        return (status, {"error": "busy"}) if status else honest(body)

    with serving(busy) as recipe, remote.server_answerer(recipe, tokenizer) as answerer:
        assert answerer.answer([Ask([7], 1, 0.0, 0)])[0].token_ids == WORDS
    assert next(refusals, None) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": None}, "gives text but no token ids.*use vLLM 0.10.2 or later"),
        ({"prompt_token_ids": [1]}, "read 1 tokens where .* were sent"),
        ({"text": "Something else."}, "with another tokenizer: it says 'Something else.'"),
        ({"token_ids": [10**6], "text": ""}, "with another tokenizer"),
        ({"finish_reason": "content_filter"}, "ended an answer with 'content_filter'"),
    ],
)
def test_a_server_that_is_not_token_exact_is_refused(tokenizer, honest, change, message):
    def wrong(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status, answer = honest(body)
        answer["choices"][0] |= change
        return status, answer

    with (
        serving(wrong) as recipe,
        pytest.raises(ServerError, match=message),
        remote.server_answerer(recipe, tokenizer),
    ):
        pass


@pytest.mark.parametrize(
    ("models", "message"),
    [
        (({"id": "a"}, {"id": "b"}), r"serves 2 models \(a, b\): name the target's in responses.server_model"),
        (({"id": "m", "max_model_len": 512},), "max_model_len 512, but engine.max_model_len is 1024"),
    ],
)
def test_a_server_of_something_else_is_refused(tokenizer, honest, models, message):
    with (
        serving(honest, models) as recipe,
        pytest.raises(ServerError, match=message),
        remote.server_answerer(recipe, tokenizer),
    ):
        pass


def test_refusals_and_silence_are_told_apart(tokenizer, monkeypatch):
    with (
        serving(lambda _: (400, {"error": "too long"})) as recipe,
        pytest.raises(ServerError, match="answered 400 for model 'm': .*too long"),
        remote.server_answerer(recipe, tokenizer),
    ):
        pass
    monkeypatch.setattr(remote, "_RETRIES", 1)  # of eight: forty seconds
    with (  # the server is gone by now
        pytest.raises(ServerError, match=r"did not answer 2 times in a row \(.*\): start the server or correct"),
        remote.server_answerer(recipe, tokenizer),
    ):
        pass


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("http://h:8000", "http://h:8000/v1"),
        ("http://h:8000/", "http://h:8000/v1"),
        ("https://h/proxy/v1/", "https://h/proxy/v1"),
    ],
)
def test_the_path_of_the_url_may_be_left_out(given, used):
    assert remote.api_url(given) == used
