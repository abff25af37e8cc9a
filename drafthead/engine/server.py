"""A vLLM server: the command that serves a target, the process of it that is started here, and requests to it.

A server started here listens on the loopback address only, on a port the system chose, with a random API key that
travels in the environment and is never printed. It runs in a process group of its own, which is killed on every way
out: the end of the block, an exception, and (on Linux) the death of this process by any signal. Development mode is on,
because resetting the prefix cache between loads needs it; the routes it adds need no key, so other users of the same
machine could reach them while the server runs. The alternative, `vllm serve` in another terminal, leaves ports, caches
and clean-up to the user; `eval/serving.py` prints that command for deployment.
"""

import json
import os
import re
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import torch

from drafthead.config import Recipe
from drafthead.engine.offline import cpu_cache_gib, target_arguments
from drafthead.processes import ends_with_parent
from drafthead.progress import wait_until

HOST = "127.0.0.1"
SERVER_MODULE = "drafthead.engine.api_server"  # vLLM's own, with its CPU build repaired
_START_S, _STOP_S = 1800, 10


class ServerError(ValueError):
    """The server did not start, died, or refused a request."""


def server_command(
    recipe: Recipe, port: int, speculative: dict[str, Any] | None = None, extra_args: Sequence[str] = ()
) -> list[str]:
    """The command that serves the target on `port`; it holds no secret."""
    return [
        *(sys.executable, "-m", SERVER_MODULE, *server_flags(recipe, speculative)),
        # Otherwise the model's generation_config.json fills in top_k, top_p and min_p where requests leave them out.
        *("--generation-config", "vllm"),
        *("--host", HOST, "--port", str(port)),
        *extra_args,
    ]


def server_flags(recipe: Recipe, speculative: dict[str, Any] | None = None) -> list[str]:
    """vLLM's flags for the recipe, without address: what a deployment uses too."""
    values = target_arguments(recipe, not torch.cuda.is_available(), (speculative or {}).get("model"))
    values["served_model_name"] = recipe.name
    if recipe.target.chat_template_kwargs:  # of requests to /v1/chat/completions, which clients send
        values["default_chat_template_kwargs"] = _compact(recipe.target.chat_template_kwargs)
    if speculative:
        values["speculative_config"] = _compact(speculative)
    flags = {f"--{key.replace('_', '-')}": value for key, value in values.items()}
    return [part for flag, value in flags.items() for part in ((flag,) if value is True else (flag, str(value)))]


def _compact(config: dict[str, Any]) -> str:
    return json.dumps(config, separators=(",", ":"))


def speculative_flag(config: dict[str, Any] | None) -> str:
    """The flag that turns drafting on in vLLM, ready for a shell; empty for a server without it."""
    return f"--speculative-config {shlex.quote(_compact(config))}" if config else ""


def deployment_command(recipe: Recipe, config: dict[str, Any] | None) -> str:
    """The whole command that serves target and draft model, as it works on this kind of machine."""
    flags = shlex.join(server_flags(recipe, config))
    if torch.cuda.is_available():
        return f"vllm serve {flags}"
    # The CPU build has no working `vllm` command.
    space = server_environment(recipe)["VLLM_CPU_KVCACHE_SPACE"]
    return f"VLLM_CPU_KVCACHE_SPACE={space} python -m {SERVER_MODULE} {flags}"


def server_environment(recipe: Recipe) -> dict[str, str]:
    """What the server's environment needs beyond the caller's own, the key excepted."""
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if not torch.cuda.is_available():
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(cpu_cache_gib())
        if recipe.engine.tensor_parallel_size == 1:
            # The model runs inside the engine's process: one Python fewer to start, which is a third of
            # the start-up time on a CPU; tokens per second are the same.
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # One core stays with the HTTP side and the load generator: OpenMP threads that wait for each other
        # spin, and a core too few makes every step tens of times slower.
        cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores - 1))
    return environment


@contextmanager
def running_server(
    recipe: Recipe,
    log_path: Path,
    *,
    speculative: dict[str, Any] | None = None,
    extra_args: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Iterator["Server"]:
    """Serve the recipe's target while the block runs.

    Args:
        recipe: recipe; its target and engine sections are read.
        log_path: file for the server's output; replaced if it exists.
        speculative: vLLM's speculative_config; None serves without speculation.
        extra_args: further flags of vLLM's server.
        environment: variables beside those that every server gets.

    Raises:
        ServerError: the server died or did not answer in time (the message ends with its last lines), or another
            program took its port.
    """
    key, port = secrets.token_urlsafe(24), _free_port()
    command = server_command(recipe, port, speculative, extra_args)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | server_environment(recipe) | {"VLLM_API_KEY": key, **(environment or {})},
            start_new_session=True,
            preexec_fn=ends_with_parent(),
        )
        try:
            server = Server(f"http://{HOST}:{port}", recipe.name, key, log_path, tuple(command), process=process)
            server = replace(server, start_s=server.wait_until_healthy())
            server.check_key()
            yield server
        finally:
            _stop_group(process)


def _free_port() -> int:
    # The server takes it seconds later: none that Linux gives to outgoing connections meanwhile, which begin at 32,768.
    # Another server may still be there first: see Server.check_key.
    while True:
        port = 20_000 + secrets.randbelow(12_000)
        with suppress(OSError), socket.socket() as probe:
            probe.bind((HOST, port))
            return port


def _stop_group(process: subprocess.Popen) -> None:
    """End the whole process group, by force where SIGTERM does not."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + _STOP_S
        with suppress(ProcessLookupError):  # the group has no process left
            os.killpg(process.pid, number)
            while time.monotonic() < deadline:
                process.poll()  # reap the leader, or its group would never look empty
                os.killpg(process.pid, 0)
                time.sleep(0.05)
    process.wait()


@dataclass(frozen=True)
class Server:
    """A running server.

    Attributes:
        base_url: what the paths of requests are appended to, such as http://127.0.0.1:41237.
        model: the name requests must use.
        api_key: key of the /v1 routes; not part of the representation, so that it reaches no log.
        log_path: everything the server wrote; None for one that was not started here, which may lack the cache reset
            and the counters.
        command: command line that was started.
        start_s: seconds from the start of the process until it is healthy.
        process: process that was started here, or None.
    """

    base_url: str
    model: str
    api_key: str = field(repr=False)
    log_path: Path | None = None
    command: tuple[str, ...] = ()
    start_s: float = 0.0
    process: "subprocess.Popen[bytes] | None" = field(default=None, repr=False)

    def client(self, timeout_s: float = 600.0) -> httpx.Client:
        """An HTTP client that carries the key and ignores proxy settings."""
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        return httpx.Client(base_url=self.base_url, headers=headers, timeout=timeout_s, trust_env=False)

    def request(self, method: str, path: str, timeout_s: float = 30, **options: Any) -> httpx.Response:
        """One HTTP request; the caller checks the status of the response.

        Raises:
            ServerError: the server is gone, see `gone`.
        """
        try:
            with self.client(timeout_s) as client:
                return client.request(method, path, **options)
        except httpx.TransportError as error:
            raise self.gone(f"{type(error).__name__}: {error}") from error

    def wait_until_healthy(self) -> float:
        """Seconds until the server answers.

        Raises:
            ServerError: it has ended, or does not answer in time.
        """
        deadline = time.monotonic() + _START_S

        def healthy() -> bool:
            late = f"it does not answer on {self.base_url} within {_START_S} s" if time.monotonic() > deadline else ""
            if why := self.how_it_ended() or late:
                raise ServerError(f"vLLM did not start: {why}. {_last_lines(self.log_path)}")
            with suppress(httpx.TransportError):  # not listening yet; whoever answers is not given the key
                return httpx.get(f"{self.base_url}/health", timeout=2, trust_env=False).is_success
            return False

        return wait_until(healthy, f"vLLM to start (it logs to {self.log_path})")

    def check_key(self) -> None:
        """Check that this is the server that was started here: no other one knows its key.

        Raises:
            ServerError: another server took the port first.
        """
        wrong_key = self.request("GET", "/v1/models", headers={"Authorization": "Bearer wrong"})
        if wrong_key.is_success or not self.request("GET", "/v1/models").is_success:
            raise ServerError(
                f"another server answers on {self.base_url}, which was free before; run the command again"
            )

    def how_it_ended(self, patience_s: float = 0) -> str:
        """How the process ended; empty while it runs, and for one that was not started here.

        Args:
            patience_s: seconds to wait for the end of the server, whose connections break a moment before.
        """
        if self.process is None:
            return ""
        with suppress(subprocess.TimeoutExpired):
            code = self.process.wait(patience_s)
            return f"it was killed by {signal.Signals(-code).name}" if code < 0 else f"it ended with code {code}"
        return ""

    def gone(self, seen: str) -> ServerError:
        """The error for a server that stopped answering, with how that showed and the last lines of its log."""
        details = "; ".join(filter(None, (seen, self.how_it_ended(patience_s=2))))
        return ServerError(
            f"{self.base_url} ({self.model}) stopped answering ({details}). {_last_lines(self.log_path)}"
        )

    def reset_prefix_cache(self, patience_s: float = 30) -> bool:
        """Drop all cached prefixes; False when a server that was not started here cannot.

        A server that still holds blocks, as it does for a moment after the last response, returns `{"success": false}`
        with code 200 (vLLM 0.32); the request is then repeated.

        Args:
            patience_s: seconds for which the request is repeated.

        Raises:
            ServerError: the server refuses, as it does while requests run, or is gone.
        """
        deadline = time.monotonic() + patience_s
        while True:
            response = self.request("POST", "/reset_prefix_cache")
            done = response.is_success and b'"success":false' not in response.content.replace(b" ", b"")
            if done or response.is_error or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        if self.log_path is not None and not done:
            raise ServerError(f"reset_prefix_cache answered {response.status_code}: {response.text[:200]}")
        return done

    def metrics(self) -> dict[str, float]:
        """See `parse_metrics`; empty when a server that was not started here has no such page.

        Raises:
            ServerError: the server is gone.
        """
        response = self.request("GET", "/metrics")
        if self.log_path is None and not response.is_success:  # of a redirection, too
            return {}
        return parse_metrics(response.raise_for_status().text)


_SAMPLE = re.compile(r"^(vllm:\w+?)(?:_total)?\{([^}]*)\} (\S+)$", re.MULTILINE)


def parse_metrics(text: str) -> dict[str, float]:
    """vLLM's counters and gauges on a Prometheus page, summed over labels but for draft positions.

    `_total` is dropped from the names of counters; parts of histograms are left in by their own names.
    """
    values: dict[str, float] = {}
    for name, labels, value in _SAMPLE.findall(text):
        position = re.search(r'position="(\d+)"', labels)
        key = f"{name}[{position[1]}]" if position else name
        values[key] = values.get(key, 0.0) + float(value)
    return values


_CAPACITY = {
    "kv_cache_tokens": re.compile(r"KV cache size: ([\d,]+) tokens"),  # vllm/v1/core/kv_cache_utils.py
    # vllm/v1/worker/gpu_model_runner.py; not on the CPU build
    "weights_gib": re.compile(r"Model loading took ([\d.]+) GiB"),
}


def server_capacity(log: Path | None) -> dict[str, float]:
    """What a server has left for requests after loading its weights, from its log.

    The counters on /metrics know the cache in blocks only; with several cache groups (a draft head, sliding windows)
    the number of tokens is what vLLM computes and logs.

    Returns:
        `kv_cache_tokens`, tokens that fit, and `weights_gib`, memory of target and draft weights on one GPU; NaN for
        what the log does not have, or without a log.
    """
    text = log.read_text(encoding="utf-8", errors="replace") if log and log.is_file() else ""
    return {
        key: max((float(value.replace(",", "")) for value in pattern.findall(text)), default=float("nan"))
        for key, pattern in _CAPACITY.items()
    }


def _last_lines(log: Path | None) -> str:
    """The end of a server's log, for an error message; empty for a server that was not started here."""
    if log is None:
        return ""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
    return f"Last lines of {log}:\n" + "\n".join(lines)
