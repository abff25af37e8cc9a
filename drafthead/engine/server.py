"""A vLLM server that answers: requests with its key, its cache, its counters."""

import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families


class ServerError(ValueError):
    """The server did not start, died, or refused a request."""


@dataclass(frozen=True)
class Server:
    """A server that answers.

    Attributes:
        base_url: such as http://127.0.0.1:41237, without a path.
        model: the name requests must use.
        api_key: what /v1 routes ask for; not part of the representation, so that it reaches no log.
        log_path: everything the server wrote; None for one of somebody else's.
        command: what was started.
        start_s: seconds from the start of the process to its first healthy answer.
        managed: whether it was started here; another's may lack the cache reset and the counters.
        process: that was started; None for one of somebody else's.
    """

    base_url: str
    model: str
    api_key: str = field(repr=False)
    log_path: Path | None
    command: tuple[str, ...]
    start_s: float
    managed: bool = True
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    @property
    def port(self) -> int:
        """The port it listens on."""
        return int(self.base_url.rsplit(":", 1)[1])

    def client(self, timeout_s: float = 600.0) -> httpx.Client:
        """An HTTP client that carries the key and ignores proxy settings."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.Client(base_url=self.base_url, headers=headers, timeout=timeout_s, trust_env=False)

    def ask(self, method: str, path: str, timeout_s: float = 30, **options: Any) -> httpx.Response:
        """One request; what was answered is the caller's to judge.

        Raises:
            ServerError: nobody answers any more, see `gone`.
        """
        try:
            with self.client(timeout_s) as client:
                return client.request(method, path, **options)
        except httpx.TransportError as error:
            raise self.gone(f"{type(error).__name__}: {error}", patience_s=2) from error

    def how_it_ended(self, patience_s: float = 0) -> str:
        """In words; empty while it runs, and for one of somebody else's.

        Args:
            patience_s: to wait for its end: its connections break a moment before.
        """
        if self.process is None:
            return ""
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(patience_s)
            return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"
        return ""

    def gone(self, seen: str, patience_s: float = 0) -> ServerError:
        """The error for a server that nobody can reach any more; it ends with the last lines of the server's log.

        Args:
            seen: how that showed.
            patience_s: as in `how_it_ended`.
        """
        how = self.how_it_ended(patience_s)
        said = f" Last lines of {self.log_path}:\n{log_tail(self.log_path)}" if self.log_path else ""
        return ServerError(
            f"{self.base_url} ({self.model}) stopped answering ({seen}{f'; {how}' if how else ''}); what was "
            f"measured before is kept, the same command continues.{said}"
        )

    def reset_prefix_cache(self, patience_s: float = 30) -> bool:
        """Forget all cached prefixes; False when a server of somebody else's cannot.

        A server that still holds blocks, as it does for a moment after the last answer, says `{"success": false}` with
        code 200 (vLLM 0.32) and is asked again.

        Args:
            patience_s: for how long.

        Raises:
            ServerError: the server refuses, as it does while requests run, or is gone.
        """
        deadline = time.monotonic() + patience_s
        while True:
            answer = self.ask("POST", "/reset_prefix_cache")
            held = answer.is_success and b'"success":false' in answer.content.replace(b" ", b"")
            if not held or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        if answer.is_success and not held:
            return True
        if not self.managed:
            return False
        raise ServerError(f"reset_prefix_cache answered {answer.status_code}: {answer.text[:200]}")

    def metrics(self) -> dict[str, float]:
        """The server's counters and gauges by name; labelled samples are summed.

        Counts by draft position keep their position: `vllm:spec_decode_num_accepted_tokens_per_pos[0]`. Empty when a
        server of somebody else's has no such page.

        Raises:
            ServerError: the server is gone.
        """
        answer = self.ask("GET", "/metrics")
        if not self.managed and answer.is_error:
            return {}
        return parse_metrics(answer.raise_for_status().text)


def parse_metrics(text: str) -> dict[str, float]:
    """Counters and gauges of a Prometheus page; `_total` is dropped from the names of counters."""
    values: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        if family.type not in ("counter", "gauge"):
            continue
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            name = sample.name.removesuffix("_total")
            if "position" in sample.labels:
                name += f"[{sample.labels['position']}]"
            values[name] = values.get(name, 0.0) + sample.value
    return values


def log_tail(path: Path, lines: int = 15) -> str:
    """The last lines of a server's log."""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])
