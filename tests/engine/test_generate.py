"""Generation on a server that misbehaves on purpose, and an engine whose cache is not reset.

A server that does everything right, `vllm serve`, is used in tests/generation/test_turns.py.
"""

from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from drafthead.config import Recipe
from drafthead.engine import generate
from drafthead.engine.generate import EngineGenerator, GenerationRequest, ServerGenerator
from drafthead.engine.server import ServerError
from tests.engine.little_server import WORDS, Reply, honest_reply, serving


@pytest.fixture
def honest(tokenizer) -> Reply:
    return honest_reply(tokenizer)


def generator_of(recipe: Recipe, tokenizer: Any) -> ServerGenerator:
    return ServerGenerator(recipe.responses.server_url, (recipe.name, recipe.target.path), 8, tokenizer)


@contextmanager
def refused(reply: Reply, tokenizer: Any, message: str, **options: Any):
    """A server with this reply cannot be used, and the message says why."""
    with serving(reply, **options) as recipe:
        with pytest.raises(ServerError, match=message):
            generator_of(recipe, tokenizer)
        yield recipe


def test_generations_come_in_the_order_of_the_requests(tokenizer, honest):
    def echo(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status, reply = honest(body)
        if body["max_tokens"] == 1:
            reply["choices"][0]["token_ids"] = body["prompt"]
        return status, reply

    with serving(echo) as recipe:
        generator = generator_of(recipe, tokenizer)
        requests = [GenerationRequest([7, i], 1, 0.7, i) for i in range(100)]
        found = [generation.token_ids for generation in generator.generate(requests)]
    assert found == [request.prompt_ids for request in requests]
    assert generator.made_by["model"] == "m"


def test_requests_to_an_overloaded_server_are_repeated(tokenizer, honest):
    refusals = iter([503, 429])

    def busy(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status = next(refusals, None)
        return (status, {"error": "busy"}) if status else honest(body)

    with serving(busy) as recipe:
        (generation,) = generator_of(recipe, tokenizer).generate([GenerationRequest([7], 1, 0.0, 0)])
    assert generation.token_ids == WORDS
    assert next(refusals, None) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": None}, "return_token_ids"),
        ({"prompt_token_ids": [1]}, "read 1 tokens"),
        ({"text": "Something else."}, "tokenizer.*Something else"),
        ({"token_ids": [10**6], "text": ""}, "tokenizer"),
        ({"finish_reason": "content_filter"}, "content_filter"),
    ],
)
def test_a_server_that_is_not_token_exact_is_refused(tokenizer, honest, change, message):
    def wrong(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        status, reply = honest(body)
        reply["choices"][0] |= change
        return status, reply

    with refused(wrong, tokenizer, message):
        pass


def test_a_server_of_something_else_is_refused(tokenizer, honest):
    with refused(honest, tokenizer, r"2 models \(a, b\).*--served-model-name tiny", models=({"id": "a"}, {"id": "b"})):
        pass


@pytest.mark.parametrize("name", ["tiny", "data_gen/tiny/target"])
def test_of_several_models_the_one_named_as_the_target_is_used(tokenizer, honest, name):
    with serving(honest, models=({"id": "other"}, {"id": name})) as recipe:
        assert generator_of(recipe, tokenizer).made_by["model"] == name


def test_refusals_and_silence_are_told_apart(tokenizer, monkeypatch):
    with refused(lambda _: (400, {"error": "too long"}), tokenizer, "400.*too long") as recipe:
        pass
    monkeypatch.setattr(generate, "_RETRIES", 1)  # of eight: forty seconds
    with pytest.raises(ServerError, match="did not answer"):  # the server is gone by now
        generator_of(recipe, tokenizer)


def test_the_path_of_the_url_may_be_left_out():
    assert generate.api_url("http://h:8000") == generate.api_url("http://h:8000/") == "http://h:8000/v1"
    assert generate.api_url("https://h/proxy/v1/") == "https://h/proxy/v1"


def test_the_prefix_cache_is_reset_until_nothing_holds_it():
    results = iter([False, True])
    EngineGenerator(SimpleNamespace(reset_prefix_cache=lambda: next(results))).reset_cache()
    assert next(results, None) is None
