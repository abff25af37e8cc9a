"""A vLLM server that this process starts, watches and always stops.

It listens on the loopback address only, on a port the system chose, with a random API key that travels in
the environment and is never printed. It runs in a process group of its own, which is killed on every way
out: the end of the block, an exception, SIGTERM, and (on Linux) the death of this process. Development
mode is on, because resetting the prefix cache between loads needs it; the routes it adds ask for no key,
so other users of the same machine could reach them while the server runs. The alternative, `vllm serve` in
another terminal, leaves ports, caches and clean-up to the user; `eval/serving.py` prints that command for
deployment.
"""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from prometheus_client.parser import text_string_to_metric_families

from drafthead.config import Recipe
from drafthead.processes import ends_with_parent
from drafthead.progress import progress_bar

HOST = "127.0.0.1"
SERVER_MODULE = "drafthead.serving.api_server"  # vLLM's own, with its CPU build repaired
_USUAL_START_S = 30
_STOP_S = 10


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


@contextmanager
def running_server(
    recipe: Recipe,
    log_path: Path,
    *,
    speculative: dict[str, Any] | None = None,
    extra_args: Sequence[str] = (),
    timeout_s: float = 1800.0,
) -> Iterator[Server]:
    """Serve the recipe's target while the block runs.

    Args:
        recipe: target and engine settings.
        log_path: file for the server's output; replaced if it exists.
        speculative: vLLM's speculative_config; None serves without speculation.
        extra_args: further flags of vLLM's server.
        timeout_s: how long the start may take, in seconds.

    Raises:
        ServerError: the server died or did not answer in time; the message ends with its last lines.
    """
    key, port = secrets.token_urlsafe(24), _free_port()
    command = server_command(recipe, port, speculative, extra_args)
    log_path.parent.mkdir(parents=True, exist_ok=True)
    begun = time.monotonic()
    with log_path.open("wb") as log, _sigterm_as_exit():
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | server_environment(recipe) | {"VLLM_API_KEY": key},
            start_new_session=True,
            preexec_fn=ends_with_parent(),
        )
        try:
            base_url = f"http://{HOST}:{port}"
            _wait_until_healthy(process, base_url, log_path, timeout_s)
            started = time.monotonic() - begun
            yield Server(base_url, recipe.name, key, log_path, tuple(command), started)
        finally:
            _stop_group(process)


def server_command(
    recipe: Recipe, port: int, speculative: dict[str, Any] | None = None, extra_args: Sequence[str] = ()
) -> list[str]:
    """The command that serves the target on `port`; it holds no secret."""
    return [
        sys.executable,
        "-m",
        SERVER_MODULE,
        *server_flags(recipe, speculative),
        "--host",
        HOST,
        "--port",
        str(port),
        *extra_args,
    ]


def server_flags(recipe: Recipe, speculative: dict[str, Any] | None = None) -> list[str]:
    """vLLM's flags for the recipe, without address: what a deployment uses too."""
    engine = recipe.engine
    flags = ["--model", recipe.target_path, "--served-model-name", recipe.name]
    flags += ["--dtype", recipe.target.dtype, "--max-model-len", str(engine.max_model_len)]
    flags += ["--max-num-seqs", str(engine.max_num_seqs)]
    if recipe.target.revision:
        flags += ["--revision", recipe.target.revision]
    if recipe.target.trust_remote_code:
        flags += ["--trust-remote-code"]
    if engine.max_num_batched_tokens:
        flags += ["--max-num-batched-tokens", str(engine.max_num_batched_tokens)]
    if engine.tensor_parallel_size > 1:
        flags += ["--tensor-parallel-size", str(engine.tensor_parallel_size)]
    if torch.cuda.is_available():
        flags += ["--gpu-memory-utilization", str(engine.gpu_memory_utilization)]
    else:
        flags += ["--enforce-eager"]
    if speculative:
        flags += ["--speculative-config", json.dumps(speculative)]
    return flags


def server_environment(recipe: Recipe) -> dict[str, str]:
    """What the server's environment needs beyond the caller's own, the key excepted."""
    environment = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    if not torch.cuda.is_available():
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(recipe.engine.kv_cache_space_gib)
        if recipe.engine.tensor_parallel_size == 1:
            # The model runs inside the engine's process: one Python fewer to start, which is a third of
            # the start-up time on a CPU; tokens per second are the same.
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        # One core stays with the HTTP side and the load generator: OpenMP threads that wait for each other
        # spin, and a core too few makes every step tens of times slower.
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS") or str(max(1, _cores() - 1))
    return environment


def log_tail(path: Path, lines: int = 15) -> str:
    """The last lines of a server's log."""
    return "\n".join(path.read_text(encoding="utf-8", errors="replace").splitlines()[-lines:])


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def _free_port() -> int:
    # Another process may take it before the server does; the server then dies and its log says so.
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def _wait_until_healthy(process: subprocess.Popen, base_url: str, log_path: Path, timeout_s: float) -> None:
    begun = time.monotonic()
    with (
        progress_bar(_USUAL_START_S, "starting vLLM", "s") as bar,
        httpx.Client(base_url=base_url, timeout=2, trust_env=False) as client,
    ):
        while True:
            waited = time.monotonic() - begun
            if process.poll() is not None:
                raise ServerError(
                    f"vLLM ended with code {process.returncode} after {waited:.0f} s. Last lines of {log_path}:\n"
                    f"{log_tail(log_path)}"
                )
            if waited > timeout_s:
                raise ServerError(
                    f"vLLM did not answer on {base_url} within {timeout_s:.0f} s. Last lines of {log_path}:\n"
                    f"{log_tail(log_path)}"
                )
            try:
                if client.get("/health").status_code == httpx.codes.OK:
                    return
            except httpx.TransportError:
                pass  # not listening yet
            time.sleep(0.25)
            bar.total = max(_USUAL_START_S, int(waited) + 1)
            bar.update(int(waited) - bar.n)


def _stop_group(process: subprocess.Popen) -> None:
    """Ask the whole process group to end, then make it."""
    for number, patience in ((signal.SIGTERM, _STOP_S), (signal.SIGKILL, _STOP_S)):
        if not _signal_group(process.pid, number):
            break
        deadline = time.monotonic() + patience
        while time.monotonic() < deadline:
            process.poll()  # reap the leader, or its group would never look empty
            if not _signal_group(process.pid, 0):
                break
            time.sleep(0.05)
    process.wait()


def _signal_group(group: int, number: int) -> bool:
    """Send a signal; False when the group has no process left."""
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        return False
    return True


@contextmanager
def _sigterm_as_exit() -> Iterator[None]:
    """Let SIGTERM unwind the stack while a server runs: Python's default ends the process on the spot."""
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
