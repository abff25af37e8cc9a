"""Servers that are not there, or die on the way: what was done is kept, and the message says how to go on."""

import itertools
import re
import time
from pathlib import Path

import pytest

from drafthead.data.responses import read_responses
from drafthead.engine import generate
from drafthead.engine.load import LoadRequest, warm_up
from drafthead.engine.server import Server, ServerError
from drafthead.evaluation.measuring.serving import read_requests
from drafthead.generation import regenerate as stage
from drafthead.generation.prompts import make_prompts
from tests.engine.little_server import honest_reply, serving
from tests.faults.harness import finish, log_of, started
from tests.faults.stages import STAGES
from tests.generation.small import small_recipe
from tests.recipes import changed

NOBODY = "http://127.0.0.1:9"


def test_parts_that_were_answered_before_a_server_died_are_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(generate, "_RETRIES", 1)  # of eight: forty seconds
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
    monkeypatch.setattr(generate, "_RETRIES", 0)
    recipe = small_recipe(tmp_path, f"responses.server_url={NOBODY}")
    make_prompts(recipe)
    with pytest.raises(ServerError, match=NOBODY):
        stage.regenerate(recipe)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_server_killed_in_the_middle_of_a_load_costs_that_server_alone(tmp_path):
    """A real one, between the first answer of a level and the last."""
    overrides = ("eval.methods=[ngram]", "eval.served=[ngram]", "eval.max_tokens=192")
    stage = STAGES["serving"]
    finish(STAGES["prompts"], tmp_path, *overrides)
    with started(stage, tmp_path, *overrides) as process:
        answering = tmp_path / stage.writes[0] / "logs" / "01-ngram-k3-tp1.server.log"
        while process.poll() is None and not _answered(answering, 3):  # the warm-up and two prompts of eight
            time.sleep(0.01)
        (server,) = (c for c in process.children(recursive=True) if "api_server" in " ".join(c.cmdline()))
        server.kill()
        assert process.wait(600) == 2
    printed = log_of(stage, tmp_path)
    assert re.search(
        r"\nServerError: .* stopped answering \(in the middle of a load; it was killed by SIGKILL\)", printed
    )
    assert "the same command continues" in printed
    assert str(answering) in printed
    assert "Traceback" not in printed
    assert "All requests failed" not in printed
    first = stage.payload(tmp_path, finished=False)
    assert {name.rpartition("/")[2] for name in first if name.endswith("parquet")} == {
        "requests-00-none-k0-tp1.parquet", "runs-00-none-k0-tp1.parquet"
    }  # fmt: skip
    finish(stage, tmp_path, *overrides)
    assert first.items() <= stage.payload(tmp_path).items()
    rows = read_requests(tmp_path / stage.writes[0])
    assert rows.groupby("arm").size().to_dict() == {"none": 8, "ngram": 8}
    assert not rows["error"].any()


def _answered(log: Path, requests: int) -> bool:
    """Whether the server has begun so many answers."""
    return log.exists() and log.read_text(errors="replace").count("POST /v1/completions") >= requests


def test_a_server_that_is_gone_between_levels_shows_its_last_words(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("one\nCUDA out of memory\n")
    gone = Server(NOBODY, "m", "key", log, (), 1.0)
    for ask in (gone.metrics, gone.reset_prefix_cache, lambda: warm_up(gone, [LoadRequest("p", [5])], 2)):
        with pytest.raises(ServerError, match=r"(?s)stopped answering .*CUDA out of memory") as caught:
            ask()
        assert "key" not in str(caught.value).replace("KeyError", "")
