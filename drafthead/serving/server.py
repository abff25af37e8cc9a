"""A vLLM server that answers: requests with its key, its cache, its counters."""

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
    """

    base_url: str
    model: str
    api_key: str = field(repr=False)
    log_path: Path | None
    command: tuple[str, ...]
    start_s: float
    managed: bool = True

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
            ServerError: nobody answers any more; the message ends with the last lines of the server's log.
        """
        try:
            with self.client(timeout_s) as client:
                return client.request(method, path, **options)
        except httpx.TransportError as error:
            said = f" Last lines of {self.log_path}:\n{log_tail(self.log_path)}" if self.log_path else ""
            raise ServerError(
                f"{self.base_url} ({self.model}) stopped answering ({type(error).__name__}: {error}); what was "
                f"measured before is kept, the same command continues.{said}"
            ) from error

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False when a server of somebody else's has no such route.

        Raises:
            ServerError: the server refuses, as it does while requests run, or is gone.
        """
        answer = self.ask("POST", "/reset_prefix_cache")
        if not self.managed and answer.is_error:
            return False
        if answer.status_code != httpx.codes.OK:
            raise ServerError(f"reset_prefix_cache answered {answer.status_code}: {answer.text[:200]}")
        return True

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
