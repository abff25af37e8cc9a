"""An HTTP server of the process itself, which gives every request the same kind of reply."""

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@contextmanager
def replying(
    reply: Callable[[], str], idle_s: float = math.inf, status: int = 200, requested: list[str] | None = None
) -> Iterator[str]:
    """The URL of a server, a thread of this process, that replies to every request, whatever its key.

    The paths of requests are added to `requested`. A connection that was idle for longer is closed when it is used
    again, as by a server whose limit is just over.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version, used = "HTTP/1.1", math.inf

        def do_GET(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"] or 0))
            if time.monotonic() - self.used > idle_s:
                self.close_connection = True
                return
            if requested is not None:
                requested.append(self.path)
            body = reply().encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            self.used = time.monotonic()

        do_POST = do_GET  # noqa: N815

        def log_message(self, *_: object) -> None:
            """Nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
