"""Servers that are not there, or die on the way: what was done is kept, and the message says how to go on."""

import re
import time
from pathlib import Path

import pytest

from drafthead.engine.load import LoadRequest, warm_up
from drafthead.engine.server import Server, ServerError
from drafthead.evaluation.columns import read_rows
from tests.faults.harness import finish, log_of, started
from tests.faults.stages import STAGES

NOBODY = "http://127.0.0.1:9"


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
        assert process.wait(600) == 1
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
    rows = read_rows(tmp_path / stage.writes[0], "requests-*.parquet")
    assert rows[rows["workload"] == "all"].groupby("method").size().to_dict() == {"none": 8, "ngram": 8}
    assert not rows["error"].any()


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_server_that_does_not_start_does_not_keep_the_others_from_being_measured(tmp_path):
    broken = "{name: broken, method: ngram, extra: {prompt_lookup_min: 9, prompt_lookup_max: 1}}"
    overrides = (f"eval.methods=[{broken},ngram]", "eval.served=[broken,ngram]", "eval.workloads=all")
    stage = STAGES["serving"]
    finish(STAGES["prompts"], tmp_path, *overrides)
    with started(stage, tmp_path, *overrides) as process:
        assert process.wait(500) == 1
    printed = log_of(stage, tmp_path)
    assert re.search(r"\nServerError: vLLM did not start: .* code 1\. .*prompt_lookup_min", printed, re.DOTALL)
    assert "Not measured: broken-k3-tp1. " in printed
    assert "Traceback" not in printed.partition("\nServerError")[0].partition("is left out for now")[0]
    measured = {path.name for path in (tmp_path / stage.writes[0]).glob("runs-*.parquet")}
    assert measured == {"runs-00-none-k0-tp1.parquet", "runs-02-ngram-k3-tp1.parquet"}


def _answered(log: Path, requests: int) -> bool:
    """Whether the server has begun so many answers."""
    return log.exists() and log.read_text(errors="replace").count("POST /v1/completions") >= requests


def test_a_server_that_is_gone_between_levels_shows_its_last_words(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("one\nCUDA out of memory\n")
    gone = Server(NOBODY, "m", "key", log)
    for ask in (gone.metrics, gone.reset_prefix_cache, lambda: warm_up(gone, [LoadRequest("p", [5])], 2)):
        with pytest.raises(ServerError, match=r"(?s)stopped answering .*CUDA out of memory") as caught:
            ask()
        assert "key" not in str(caught.value).replace("KeyError", "")
