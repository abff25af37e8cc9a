"""A vLLM server that this process starts, watches and always stops.

It listens on the loopback address only, on a port the system chose, with a random API key that travels in
the environment and is never printed. It runs in a process group of its own, which is killed on every way
out: the end of the block, an exception, SIGTERM, and (on Linux) the death of this process. Development
mode is on, because resetting the prefix cache between loads needs it; the routes it adds ask for no key,
so other users of the same machine could reach them while the server runs. The alternative, `vllm serve` in
another terminal, leaves ports, caches and clean-up to the user; `eval/serving.py` prints that command for
deployment.
"""

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
from pathlib import Path
from typing import Any

import httpx

from drafthead.config import Recipe
from drafthead.engine.server import Server, ServerError, log_tail
from drafthead.engine.server_command import HOST, server_command, server_environment
from drafthead.processes import ends_with_parent
from drafthead.progress import progress_bar

_USUAL_START_S = 30
_STOP_S = 10


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
        ServerError: the server died or did not answer in time (the message ends with its last lines), or another
            program took its port.
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
            server = Server(base_url, recipe.name, key, log_path, tuple(command), started, process=process)
            _check_ours(server)
            yield server
        finally:
            _stop_group(process)


def _free_port() -> int:
    # Another process may take it before the server does, which is seconds later: see _check_ours.
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


def _check_ours(server: Server) -> None:
    """Only the server that was started here knows the key.

    Raises:
        ServerError: another one took the port first.
    """
    strangers_key = server.ask("GET", "/v1/models", headers={"Authorization": "Bearer somebody-elses"})
    if strangers_key.is_success or not server.ask("GET", "/v1/models").is_success:
        raise ServerError(f"another server answers on {server.base_url}, which was free before; run the command again")


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
