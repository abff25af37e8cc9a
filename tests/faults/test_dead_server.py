"""Servers that are not there, or die on the way: what was done is kept, and the message says how to go on."""

import itertools

import pytest

from drafthead.data.responses import read_responses
from drafthead.generation.prompts.splits import make_prompts
from drafthead.generation.responses import regenerate as stage
from drafthead.serving import remote
from drafthead.serving.load import LoadRequest, warm_up
from drafthead.serving.server import Server, ServerError
from tests.generation.small import small_recipe
from tests.recipes import changed
from tests.serving.little_server import honest_reply, serving

NOBODY = "http://127.0.0.1:9"


def test_parts_that_were_answered_before_a_server_died_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_RETRIES", 1)  # of eight: forty seconds
    recipe = small_recipe(tmp_path)  # 12 prompts in parts of 8
    make_prompts(recipe)
    reply, asked = honest_reply(stage.load_tokenizer(recipe)), itertools.count()

    def dies(body):  # after the probe and the first part
        return reply(body) if next(asked) < 9 else (503, {"error": "gone"})

    def at(server):
        return changed(recipe, "responses", server_url=server.responses.server_url)

    with serving(dies) as server, pytest.raises(ServerError, match="answered 503"):
        stage.regenerate(at(server))
    parts = recipe.responses_dir("train")
    assert sorted(p.name for p in parts.iterdir()) == ["identity.json", "part-00000.parquet"]
    first = (parts / "part-00000.parquet").read_bytes()
    with serving(reply) as server:  # another address
        stage.regenerate(at(server))
    assert (parts / "part-00000.parquet").read_bytes() == first
    assert len(read_responses(parts)) == 12


def test_nobody_at_the_url_is_said_with_the_way_on(tmp_path, monkeypatch):
    monkeypatch.setattr(remote, "_RETRIES", 0)
    recipe = small_recipe(tmp_path, f"responses.server_url={NOBODY}")
    make_prompts(recipe)
    with pytest.raises(ServerError, match=rf"{NOBODY}/v1 did not answer .* the same command continues"):
        stage.regenerate(recipe)


def test_a_server_that_is_gone_between_levels_shows_its_last_words(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("one\nCUDA out of memory\n")
    gone = Server(NOBODY, "m", "key", log, (), 1.0)
    for ask in (gone.metrics, gone.reset_prefix_cache, lambda: warm_up(gone, [LoadRequest("p", [5])], 2)):
        with pytest.raises(ServerError, match=r"(?s)stopped answering .*CUDA out of memory") as caught:
            ask()
        assert "key" not in str(caught.value).replace("KeyError", "")
