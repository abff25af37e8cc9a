"""What a server writes of its requests: private, whole or left out, gone at its age, and only with consent."""

import asyncio
import os
import time

import pytest
from cryptography.fernet import Fernet
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics

from drafthead.adapting import control
from drafthead.adapting.capture import KEY, CaptureError, Log, capture_key, redaction
from drafthead.adapting.endpoint import _CLIENT, MIXED, Client, Recorder, client_of
from drafthead.config.recipe import AdaptConfig
from tests.recipes import tiny_recipe

SECRET = [4711, 4712]


def test_only_the_owner_reads_records_which_come_once_in_order_but_for_a_line_that_a_kill_tore(tmp_path):
    log = Log(tmp_path / "captured")
    log.append({"i": 0})
    with log.segments()[0].open("ab") as file:
        file.write(b'{"i": 1')
    after = Log(tmp_path / "captured")  # of the next process
    after.append({"i": 2})
    after.append({"i": 3})
    assert [r["i"] for r in log.read()] == [0, 2, 3]
    after.append({"i": 4})
    assert log.read() == [{"i": 4}]
    assert (tmp_path / "captured").stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in log.segments()} == {0o600}


def test_what_is_no_key_is_refused_before_a_server_starts(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, "no key")
    monkeypatch.setattr(control, "running_server", None)
    with pytest.raises(CaptureError, match=KEY), control.serving(tiny_recipe(tmp_path), tmp_path):
        pass


def test_captured_text_is_encrypted_where_a_key_is_given(tmp_path, monkeypatch):
    monkeypatch.setenv(KEY, Fernet.generate_key().decode())
    Log(tmp_path, capture_key()).append({"prompt_ids": SECRET})
    assert b"4711" not in next(tmp_path.glob("*.log")).read_bytes()
    assert [list(r.pop("prompt_ids")) + list(r) for r in Log(tmp_path, capture_key()).read()] == [SECRET]
    monkeypatch.setenv(KEY, Fernet.generate_key().decode())
    with pytest.raises(CaptureError, match=KEY):
        Log(tmp_path, capture_key()).read()


def test_segments_are_deleted_at_their_age_and_when_all_are_too_large(tmp_path):
    now = time.time()
    ages = (3.0, 2.0, 0.5, 0.0)  # days
    for age in ages:
        (tmp_path / f"{int((now - age * 86_400) * 1e6):018d}-1.log").write_bytes(b"x" * 100)
    log = Log(tmp_path)
    log.purge(days=2.5)
    assert len(log.segments()) == 3
    log.purge(days=2.5, most_bytes=250)
    assert len(log.segments()) == 2
    assert float(log.segments()[0].name.split("-")[0]) / 1e6 == pytest.approx(now - 0.5 * 86_400)
    log.purge(days=2.5, most_bytes=10)
    assert len(log.segments()) == 1  # which a server writes to
    log.purge(days=0.0)
    assert not log.segments()


def test_a_hook_that_does_not_exist_is_named():
    with pytest.raises(CaptureError, match="nowhere:nothing"):
        redaction("nowhere:nothing")


@pytest.mark.parametrize(
    ("headers", "client"),
    [
        ([(b"x-drafthead-workload", b"all")], Client("unnamed", None)),
        ([(b"X-Drafthead-Workload", b"code"), (b"x-drafthead-capture", b"YES")], Client("code", True)),
        ([(b"x-drafthead-capture", b"no")], Client("unnamed", False)),
        ([(b"x-drafthead-capture", b"perhaps")], Client("unnamed", None)),
    ],
)
def test_a_request_says_its_workload_and_its_consent(headers, client):
    assert client_of(headers) == client


def answered(recorder: Recorder, client: Client, pieces: list[list[int]], delta: bool, swap: tuple = ()) -> list:
    """What a client gets of a request that comes in pieces."""
    metrics = RequestSpecDecodeMetrics.new(3)
    for accepted in (2, 0, 3):
        metrics.observe(3, accepted, detailed=True)

    async def outputs():
        for i, piece in enumerate(pieces):
            last = i == len(pieces) - 1
            for head in swap if last else ():
                recorder.swapped(head)
            said = CompletionOutput(0, "", piece, None, None, finish_reason="stop" if last else None)
            said.spec_decode_metrics = metrics if last else None
            yield RequestOutput("r", None, SECRET, None, [said], last)

    async def run():
        _CLIENT.set(client)
        return [output async for output in recorder.watch(outputs(), delta)]

    return asyncio.run(run())


def recorder(tmp_path, **settings) -> Recorder:
    return Recorder(AdaptConfig(rate=1.0, **settings), tmp_path, "head-a")


@pytest.mark.parametrize(
    ("consent", "answer", "is_captured"),
    [("asked", None, 0), ("asked", True, 1), ("asked", False, 0), ("given", None, 1), ("given", False, 0)],
)
def test_tokens_are_captured_with_consent_only_and_every_request_is_counted(tmp_path, consent, answer, is_captured):
    sent = answered(recorder(tmp_path, consent=consent), Client("code", answer), [[7, 8, 9]], delta=False)
    assert sent[-1].outputs[0].spec_decode_metrics is None  # the client sees what it would see without us
    (count,) = Log(tmp_path / "counts").read()
    assert (count["drafts"], count["proposed"], count["accepted"]) == (3, 9, 5)
    assert (count["workload"], count["head"], count["prompt_tokens"]) == ("code", "head-a", 2)
    assert "prompt_ids" not in count
    captured = Log(tmp_path / "captured").read()
    assert len(captured) == is_captured
    assert all(
        list(r["prompt_ids"]) == SECRET and list(r["response_ids"]) == [7, 8, 9] and r["steps"] == [2, 0, 3]
        for r in captured
    )


def test_a_response_that_streams_is_put_together(tmp_path):
    answered(recorder(tmp_path), Client("code", True), [[7], [8, 9]], delta=True)
    answered(recorder(tmp_path), Client("code", True), [[7], [7, 8, 9]], delta=False)
    assert [list(r["response_ids"]) for r in Log(tmp_path / "captured").read()] == [[7, 8, 9]] * 2


@pytest.mark.parametrize("swap", [("head-b",), ("head-b", "head-a")])
def test_a_request_during_which_the_head_changed_belongs_to_none(tmp_path, swap):
    answered(recorder(tmp_path), Client("code", True), [[7], [8]], delta=True, swap=swap)
    assert Log(tmp_path / "counts").read()[0]["head"] == MIXED


def without_secrets(prompt, response):
    return None if SECRET[0] in prompt else (prompt, response)


def reversed_response(prompt, response):
    return prompt, response[::-1]


def test_the_hook_decides_what_is_kept(tmp_path):
    answered(recorder(tmp_path, redact=f"{__name__}:without_secrets"), Client("all", True), [[7, 8]], delta=False)
    assert Log(tmp_path / "captured").read() == []
    answered(recorder(tmp_path, redact=f"{__name__}:reversed_response"), Client("all", True), [[7, 8]], delta=False)
    (record,) = Log(tmp_path / "captured").read()
    assert list(record["response_ids"]) == [8, 7]
    assert "steps" not in record


def test_the_rate_is_the_share_that_is_captured(tmp_path):
    settings = AdaptConfig(rate=0.25, consent="given")
    watched = Recorder(settings, tmp_path, "a")
    for _ in range(400):
        watched._write(Client(), "a", [1], [2], None)
    assert 70 <= len(Log(tmp_path / "captured").read()) <= 130
    assert len(Log(tmp_path / "counts").read()) == 400


def test_a_request_is_answered_whatever_becomes_of_its_record(tmp_path, caplog):
    watched = recorder(tmp_path)
    (tmp_path / "counts").write_text("a file where the folder should be")
    assert answered(watched, Client("code", True), [[7]], delta=False)[-1].finished
    assert "not written down" in caplog.text
    assert "4711" not in caplog.text


def test_a_record_that_a_full_disk_cut_short_ends_its_segment(tmp_path, monkeypatch):
    log, write = Log(tmp_path), os.write
    log.append({"i": 0})
    monkeypatch.setattr(os, "write", lambda file, line: write(file, line[:4]))
    with pytest.raises(OSError, match="cut short"):
        log.append({"i": 1})
    monkeypatch.setattr(os, "write", write)
    log.append({"i": 2})
    assert [r["i"] for r in log.read()] == [0, 2]
