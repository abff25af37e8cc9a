"""Starts contestants, lets them take turns, and keeps what they answer.

All contestants are loaded once and stay loaded. In every round each makes one step, in turn, and the
matrix products of the head are timed as well; so a ratio within a round compares things that ran seconds
apart. A contestant that fails is reported with the end of its stderr, and the others go on.
"""

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from stepbench.environments import Contestant
from stepbench.shapes import Shape

PARTS = Path(__file__).resolve().parents[1]


@dataclass
class Entry:
    """One contestant's variant and what it did.

    Attributes:
        name: "contestant variant".
        version: of its package.
        first: its answer to the first step (memory_bytes, before_bytes, memory_from, flops, losses, rows).
        seconds: one per round.
        error: why it left, or None.
    """

    name: str
    version: str = ""
    first: dict = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    error: str | None = None


class Player:
    """A contestant's process and the line it talks over."""

    def __init__(
        self, contestant: Contestant, variant: str, drafter: str, python: Path, shape: Shape, inputs: Path,
        device: str, threads: int,
    ):  # fmt: skip
        self.entry = Entry(f"{contestant.name} {variant}")
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in close)
        command = [
            str(python), "-m", contestant.module, "--shape", shape.name, "--inputs", str(inputs), "--device", device,
            "--variant", variant, "--drafter", drafter, "--threads", str(threads),
        ]  # fmt: skip
        path = os.pathsep.join(filter(None, (str(PARTS), os.environ.get("PYTHONPATH"))))
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip

    def prepare(self) -> None:
        """Wait until it is loaded, then let it make its first step."""
        if ready := self._hear():
            self.entry.version = ready["version"]
            self.entry.first = self._ask() or {}

    def play(self) -> None:
        """One timed step."""
        if answer := self._ask():
            self.entry.seconds.append(answer["seconds"])

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin
        if self._process.poll() is None:
            self._process.stdin.close()
            self._process.wait()
        self._stderr.close()

    def _ask(self) -> dict | None:
        if self.entry.error:
            return None
        assert self._process.stdin
        try:
            self._process.stdin.write("step\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has died; _hear says why
        return self._hear()

    def _hear(self) -> dict | None:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._stderr.seek(0)
        end = self._stderr.read()[-3000:]
        self.entry.error = f"{self.entry.name} ended with status {code}:\n{end}"
        return None
