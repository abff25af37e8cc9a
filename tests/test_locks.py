"""Two processes that start the same work: the second gets an error that names the first; a killed one holds nothing."""

import errno
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from drafthead import artifacts, locks
from drafthead.locks import LOCK, InUseError, holds
from tests.damage import half_written

STAGE = """
import sys, time
from pathlib import Path
from drafthead import artifacts
complete = artifacts.begin(Path(sys.argv[1]), "run", {"seed": 0}, alone=True)
print("complete" if complete else "began", flush=True)
time.sleep(3600)
"""


def begin(directory: Path) -> bool:
    return artifacts.begin(directory, "run", {"seed": 0}, alone=True)


@pytest.fixture
def other(tmp_path):
    """Another process that has begun the same work."""
    with subprocess.Popen([sys.executable, "-c", STAGE, str(tmp_path / "run")], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"began\n"
        yield process
        process.kill()


def test_the_second_process_is_told_who_holds_the_directory(other, tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "TIMEOUT_S", 0.1)
    run = tmp_path / "run"
    expected = rf"{other.pid} on {re.escape(socket.gethostname())} .*{run}"
    for _ in range(2):
        with pytest.raises(InUseError, match=expected):
            begin(run)
    assert {path.name for path in run.iterdir()} == {LOCK, artifacts.IDENTITY}
    assert not artifacts.begin(run, "run", {"seed": 0}), "ranks of the process that holds it begin as well"


def test_a_killed_process_holds_nothing(other, tmp_path):
    run = tmp_path / "run"
    half_written(run / artifacts.IDENTITY)
    threading.Timer(0.3, other.send_signal, [signal.SIGKILL]).start()  # resumed while it is still dying
    assert not begin(run)
    assert other.wait() == -signal.SIGKILL
    assert (run / LOCK).exists()
    assert holds(run)
    (run / "weights").write_text("rows")
    half_written(run / artifacts.MANIFEST)  # of an earlier kill
    manifest = artifacts.finish(run, {})
    assert [*manifest["files"]] == ["weights"]
    assert sorted(path.name for path in run.iterdir()) == [artifacts.IDENTITY, artifacts.MANIFEST, "weights"]


def test_what_is_complete_or_another_recipes_is_not_held(tmp_path):
    run = tmp_path / "run"
    assert not begin(run)
    assert not begin(run), "the same process may try again"
    with pytest.raises(InUseError, match=f"{os.getpid()} on"):
        locks.acquire(run)
    artifacts.finish(run, {})
    assert begin(run)
    assert not holds(run)
    with pytest.raises(artifacts.ArtifactError, match="seed: found 0, wanted 1"):
        artifacts.begin(run, "run", {"seed": 1}, alone=True)
    assert not holds(run)
    assert not (run / LOCK).exists()


def test_a_file_system_without_locks_gets_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(*args, **kwargs):
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(locks.FileLock, "acquire", refuse)
    assert not begin(tmp_path / "run")
    assert str(tmp_path / "run") in caplog.text
    assert not holds(tmp_path / "run")
