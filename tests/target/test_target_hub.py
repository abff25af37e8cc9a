"""A target that is fetched from a hub: a small HTTP server that speaks as much of its protocol as is asked for."""

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from drafthead.config import load_recipe
from tests.scripts import run_ok

TARGET = Path(load_recipe().target_path)
OLD, NEW = "a" * 40, "b" * 40


class Hub(ThreadingHTTPServer):
    """Serves the embedded target as acme/tiny, whatever commit is asked for; `main` says which one the branch is."""

    main = OLD

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[str] = []


class _Handler(BaseHTTPRequestHandler):
    server: Hub

    def do_GET(self) -> None:
        parts = self.path.split("?")[0].strip("/").split("/")
        self.server.asked.append(self.path)
        commit = parts[5] if parts[5:6] in ([OLD], [NEW]) else self.server.main
        if parts[:5] == ["api", "models", "acme", "tiny", "revision"]:
            self._send(json.dumps({"id": "acme/tiny", "sha": commit}).encode(), commit)
        elif parts[:5] == ["api", "models", "acme", "tiny", "tree"]:
            files = ({"path": p.name, "size": p.stat().st_size, "oid": p.name} for p in TARGET.iterdir())
            self._send(json.dumps([{"type": "file", **file} for file in files]).encode(), commit)
        elif parts[:3] == ["acme", "tiny", "resolve"] and (TARGET / parts[4]).is_file():
            self._send((TARGET / parts[4]).read_bytes(), parts[3])
        else:
            self.send_error(404)

    do_HEAD = do_GET  # noqa: N815 (the name http.server looks for)

    def _send(self, data: bytes, commit: str) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", f'"{hashlib.sha1(data).hexdigest()}"')
        self.send_header("X-Repo-Commit", commit)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def run(hub: Hub, cache: Path, code: str) -> str:
    """The client reads its settings at import, hence a process of its own."""
    url = f"http://127.0.0.1:{hub.server_port}"
    settings = {"HF_ENDPOINT": url, "HF_HUB_CACHE": str(cache), "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
    return run_ok("-c", code, **settings).strip()


SPEC = """
from drafthead.target.pieces import load_target_spec
print(load_target_spec("acme/tiny").fingerprint)
"""
PIECES = """
from drafthead.target.pieces import load_pieces, load_target_spec
from drafthead.target.files import pinned_revision
load_pieces("acme/tiny")
print(load_target_spec("acme/tiny").fingerprint, pinned_revision("acme/tiny"))
"""


@pytest.mark.slow
def test_what_is_fetched_later_is_of_the_commit_that_was_fetched_first(hub, tmp_path):
    fingerprint = run(hub, tmp_path, SPEC)
    assert not any("safetensors" in path for path in hub.asked if "/resolve/" in path)  # small files only
    hub.main, first = NEW, len(hub.asked)
    assert run(hub, tmp_path, PIECES) == f"{fingerprint} {OLD}"
    fetched = [path for path in hub.asked[first:] if "/resolve/" in path]
    assert any(path.endswith(f"{OLD}/model.safetensors") for path in fetched)
    assert not any(NEW in path for path in fetched)
