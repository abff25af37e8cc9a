"""A small HTTP server of the completions API, in a thread of this process, whose replies a test chooses."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from drafthead.config import Recipe, load_recipe

WORDS = [300, 301, 302]  # what an honest server always generates
Reply = Callable[[dict[str, Any]], tuple[int, dict[str, Any]]]


def honest_reply(tokenizer: Any) -> Reply:
    """A server that works, and always generates the same."""

    def reply(body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        choice = {"index": 0, "text": tokenizer.decode(WORDS), "finish_reason": "length", "logprobs": None}
        ids = {"token_ids": WORDS, "prompt_token_ids": body["prompt"]} if body["return_token_ids"] else {}
        return 200, {"id": "x", "object": "text_completion", "created": 0, "model": "m", "choices": [choice | ids]}

    return reply


@contextmanager
def serving(
    reply: Reply, models: tuple[dict[str, Any], ...] = ({"id": "m", "max_model_len": 1024},)
) -> Iterator[Recipe]:
    """A recipe whose server is a thread of this process."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._send(200, {"object": "list", "data": [{"object": "model", **model} for model in models]})

        def do_POST(self) -> None:
            self._send(*reply(json.loads(self.rfile.read(int(self.headers["Content-Length"])) or "{}")))

        def _send(self, status: int, body: dict[str, Any]) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            """Nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield load_recipe(overrides=[f"responses.server_url=http://127.0.0.1:{server.server_port}"])
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
