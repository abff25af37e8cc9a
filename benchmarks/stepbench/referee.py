"""Starts contestants, lets them take turns, and keeps what they answer.

All contestants are loaded once and stay loaded. In every round each makes one step, in turn, and the
matrix products of the head are timed as well; so a ratio within a round compares things that ran seconds
apart. A contestant that fails is reported with the end of its stderr, and the others go on.
"""

import json
import os
import subprocess
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from drafthead.processes import WAITING, ends_with_parent
from stepbench.environments import Contestant

PARTS = Path(__file__).resolve().parents[1]


@dataclass
class Entry:
    """One contestant's variant and what it did.

    Attributes:
        name: "contestant variant".
        version: version of the contestant's package.
        first: answer of the contestant to the first step (memory_bytes, before_bytes, memory_from, losses, rows).
        seconds: duration of each round.
        over_products: the same step's time over that of the matrix products of the next, one per round.
        flops: operations of the matrix products of a step.
        error: error that the contestant ended with, or None.
    """

    name: str
    version: str = ""
    first: dict = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    over_products: list[float] = field(default_factory=list)
    flops: float = 0.0
    error: str | None = None


class Player:
    """A contestant's process and the line it talks over."""

    def __init__(self, contestant: Contestant, variant: str, python: Path, arguments: list[str], threads: int):
        self.entry = Entry(f"{contestant.name} {variant}")
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in close)
        command = [
            str(python), "-m", contestant.module, *arguments, "--variant", variant, "--threads", str(threads),
        ]  # fmt: skip
        path = os.pathsep.join(filter(None, (str(PARTS), os.environ.get("PYTHONPATH"))))
        # Threads of ours wait as its scripts have them wait, a peer's as torch has them.
        removed = WAITING if contestant.requirements else ()
        environment = {key: value for key, value in os.environ.items() if key not in removed}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._stderr, text=True,
            env={**environment, "PYTHONPATH": path, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"},
            preexec_fn=ends_with_parent(),
        )  # fmt: skip

    def prepare(self) -> None:
        """Wait until it is loaded, then let it make its first step."""
        if self.load():
            self.entry.first = self.ask("step") or {}

    def load(self) -> dict | None:
        """Wait until it is loaded; what it says of itself, or None when it has left."""
        if ready := self._hear():
            self.entry.version = ready["version"]
        return ready

    def play(self) -> None:
        """One timed step, and one whose products are."""
        if answer := self.ask("step"):
            self.entry.seconds.append(answer["seconds"])
            self.entry.over_products.append(answer["over_products"])
            self.entry.flops = answer["flops"]

    def close(self) -> None:
        """Let the process end."""
        assert self._process.stdin
        if self._process.poll() is None:
            with suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()
        self._stderr.close()

    def stop(self) -> None:
        """End the process, whatever it is doing."""
        self._process.kill()
        self.close()

    def ask(self, line: str) -> dict | None:
        """Its answer to a line; None when it has left, and the entry says why."""
        if self.entry.error:
            return None
        assert self._process.stdin
        try:
            self._process.stdin.write(line + "\n")
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
