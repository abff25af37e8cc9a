"""The loop: serve, watch, collect, train on, compare, put in service; and back when acceptance falls.

    watch    -> collect   acceptance has fallen (drift)
    collect  -> train     enough tokens were captured since
    train    -> compare   the existing stages have made heads/NAME-adapt-N
    compare  -> trial     better on held-out traffic; or refused
    trial    -> watch     better on real requests, which both answer in turns: promoted; or refused
    watch    -> watch     rolled back: the new head accepts less than the old one did

What is in service is what state.json says, a file written whole: a step is done when it says so, and one that was
killed is done again by the same command. Stages run as processes of their own and resume by themselves; the server is
told which head to load whenever it has another one. Captured text is copied into the cycle's private folders (umask
077; in memory where captured text is encrypted), which are deleted when the candidate is judged.
"""

import json
import logging
import math
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd
from pydantic import BaseModel

from drafthead import artifacts
from drafthead.adapting import drift
from drafthead.adapting.capture import DAY_S, KEY, Log, Record, capture_key
from drafthead.adapting.control import Control, folder
from drafthead.adapting.drift import PromotionDecision, decide
from drafthead.adapting.endpoint import MIXED
from drafthead.adapting.rows import TooFewError, write_rows
from drafthead.cli import run_script
from drafthead.config import Recipe
from drafthead.config.evaluation import HEAD
from drafthead.data.responses import LOOP_LIMIT
from drafthead.drafters.registry import drafter_of, drafters
from drafthead.evaluation.measuring.acceptance import KIND, read_acceptance
from drafthead.files import make_folder, write_json
from drafthead.statistics import FEWEST_PROMPTS

log = logging.getLogger(__name__)
SERVED, ATTEMPTS = "served", 3  # trainings on one alarm, each on twice the tokens of the one before
POLL_S = 1.0
_REQUEST = "roll-back"  # a file
_MEMORY = Path("/dev/shm")
TURN_S, _TURNS = 15.0, (0, 1, 1, 0)  # of a trial: seconds at first, and whose (ABBA)


class Head(BaseModel):
    """A head and the run that its weights come from; `name` is that of both."""

    name: str
    since: float  # when it was put in service


class State(BaseModel):
    """What state.json says.

    Attributes:
        phase: step that the loop is in.
        heads: heads so far; the last one is in service, the others can be rolled back to.
        alarmed: time at which acceptance had fallen, in seconds since 1970.
        attempt: number of trainings since the alarm.
        cycle: number of the last training.
        probation: whether the head in service is still compared with the one before it.
        forgotten: number of the last training whose copies of captured text are deleted.
        reference_from: requests of the head from then on are what later ones are compared with; in a trial, its start.
        turn_s: length of a turn in a trial, in seconds.
        reference: requests that later ones are compared with, once there are enough, without their tokens.
        history: events of the loop with their times, from its start.
    """

    phase: Literal["watch", "collect", "train", "compare", "trial"] = "watch"
    heads: list[Head]
    alarmed: float = 0.0
    attempt: int = 0
    cycle: int = 0
    forgotten: int = 0
    probation: bool = False
    reference_from: float
    turn_s: float = TURN_S
    reference: list[Record] = []
    history: list[dict[str, Any]] = []


@dataclass
class Loop:
    """One recipe's loop.

    Attributes:
        recipe: recipe of the head that is served first.
        command: recipe file and overrides, which the stages get too.
        state: state of the loop, as on disk.
    """

    recipe: Recipe
    command: Sequence[str]
    state: State
    _read: dict[str, tuple[Log, list[Record]]] = field(default_factory=dict)
    _charted: tuple[list[Record], dict[str, drift.Chart]] = ([], {})  # a reference and its charts

    @classmethod
    def opened(cls, recipe: Recipe, command: Sequence[str]) -> "Loop":
        """The loop as its state file says, or a new one on the recipe's exported head.

        Raises:
            ArtifactError: there is no such head.
            ValueError: its kind was never swapped.
        """
        if not drafter_of(recipe.head).vllm.SWAPPABLE:
            known = ", ".join(kind for kind, drafter in drafters().items() if drafter.vllm.SWAPPABLE)
            raise ValueError(f"head.type {recipe.head.type} was not swapped in a running engine so far, only {known}")
        directory = folder(recipe)
        make_folder(directory)
        directory.chmod(0o700)
        if (path := directory / "state.json").exists():
            loop = cls(recipe, command, State.model_validate(artifacts.read_json(path)))
            if loop.state.phase == "trial":  # begins anew: one head had all that came while no loop ran
                loop._compare_from_now()
            return loop
        artifacts.require(recipe.head_dir, "head", "python export/head.py RECIPE")
        now = time.time()
        loop = cls(recipe, command, State(heads=[Head(name=recipe.name, since=now)], reference_from=now))
        loop.note("in service", recipe.name, "the head that the recipe exported")
        return loop

    # ---- State ----

    @property
    def served(self) -> Head:
        """The head in service."""
        return self.state.heads[-1]

    @property
    def candidate(self) -> Recipe:
        """The recipe of the cycle's head: its own name, everything else as written."""
        return self.recipe.model_copy(update={"name": f"{self.recipe.name}-adapt-{self.state.cycle}", "data": None})

    def head_dir(self, name: str) -> Path:
        """Of a head by name."""
        return self.recipe.model_copy(update={"name": name}).head_dir

    def note(self, event: str, head: str, why: str, **figures: Any) -> None:
        """Add to the history, and write the state."""
        log.info(f"{event}: {head} ({why})")
        self.state.history.append({"at": time.time(), "event": event, "head": head, "why": why, **figures})
        self.save()

    def save(self) -> None:
        """Write state.json, whole."""
        write_json(folder(self.recipe) / "state.json", self.state.model_dump())

    def records(self, kind: str) -> list[Record]:
        """Of `counts`, the newest as far back as they are compared, or of `captured`; kept in memory once read."""
        text, state = kind == "captured", self.state
        if kind not in self._read:
            self._read[kind] = Log(folder(self.recipe) / kind, capture_key() if text else None), []
        log, before = self._read[kind]
        watching = state.phase == "watch" and not state.probation  # without what is older than the reference
        oldest = state.reference_from if watching else min(state.reference_from, state.alarmed or state.reference_from)
        oldest = time.time() - self.recipe.adapt.retention_days * DAY_S if text else oldest
        before[:] = [r for r in [*before, *log.read()] if r["at"] >= oldest]
        if not text and watching and state.reference:
            del before[: -drift.WINDOW]
        return before

    # ---- The steps ----

    def step(self) -> None:
        """Do what is next, if anything is."""
        if self.state.phase in ("train", "compare"):
            self._restart_cycle()
        elif self.state.forgotten < self.state.cycle:  # once: later ones of the same name are the user's own
            self._delete_captured_copies()
            self.state.forgotten = self.state.cycle
            self.save()
        Log(folder(self.recipe) / "captured").purge(self.recipe.adapt.retention_days)
        getattr(self, f"_{self.state.phase}")()

    def head_to_serve(self) -> str:
        """The head that drafts now: that in service, but in a trial the candidate in half of the turns."""
        turn = int((time.time() - self.state.reference_from) / self.state.turn_s)
        return self.candidate.name if self.state.phase == "trial" and _TURNS[turn % 4] else self.served.name

    def _watch(self) -> None:
        state, first = self.state, drift.REFERENCE
        served = str(self.head_dir(self.served.name))
        rows = [r for r in self.records("counts") if r["drafts"]]
        since_start = [r for r in rows if r["head"] == served and r["at"] >= state.reference_from]
        if state.probation:
            before = str(self.head_dir(state.heads[-2].name))
            rows = [r for r in rows if r["head"] == before and state.alarmed <= r["at"] < self.served.since]
            reference, later, enough = rows[-first:], since_start[:first], drift.LEAST
        else:
            if not state.reference and len(since_start) >= first:
                state.reference = since_start[:first]
                self.save()
            reference, enough = state.reference, first
            end = max((r["at"] for r in reference), default=math.inf)
            later = [r for r in since_start if r["at"] > end]
        few = len(reference) < enough
        if not few and reference != self._charted[0]:
            self._charted = reference, drift.charts_of(reference)
        alarm = None if few else drift.first_alarm(self._charted[1], later)
        if alarm is None:
            if state.probation and (few or len(later) >= first):
                state.probation = False
                why = f"too few requests to compare with: {len(reference)}, not {enough}"
                self.note("kept", self.served.name, why if few else f"no fall in its first {len(later)} requests")
            return
        now = [r for r in later if r["at"] >= alarm.since]
        what = f"acceptance fell on {alarm.workload}, seen after {alarm.requests} requests"
        what += f": {drift.length(reference):.2f} before, {drift.length(now):.2f} now"
        if state.probation:
            self._roll_back(what)
            return
        captured = self.records("captured")
        lots = [[r["prompt_ids"] for r in captured if (r["at"] >= alarm.since) == side] for side in (False, True)]
        state.phase, state.alarmed, state.attempt = "collect", alarm.since, 0
        changed, distance = drift.what_changed(reference, now), drift.token_distance(*lots)
        self.note("drift", self.served.name, what, changed=changed, token_distance=distance)

    def _collect(self) -> None:
        state = self.state
        rows = [r for r in self.records("captured") if r["at"] >= state.alarmed]
        tokens = sum(len(r["prompt_ids"]) + len(r["response_ids"]) for r in rows)
        if tokens < self.recipe.adapt.min_tokens * 2**state.attempt:
            return
        state.cycle, state.attempt, state.phase = state.cycle + 1, state.attempt + 1, "train"
        seconds = round(time.time() - state.alarmed)
        why = f"{tokens:,} tokens of {len(rows)} requests captured since the fall, {seconds} s ago"
        self.note("training", self.candidate.name, why)

    def _train(self) -> None:
        candidate, started = self.candidate, time.monotonic()
        if capture_key() is not None:
            for directory in self._copies:
                in_memory(directory)
        if not (path := self._rows).exists():
            served = self.head_dir(self.served.name)
            try:
                write_rows(path, self.recipe, self.records("captured"), self.state.alarmed, served)
            except TooFewError as error:  # by the next training more were captured
                self._judge(PromotionDecision(False, str(error), {}))
                return
        for script, *options in (
            ("data_gen/prompts.py",), ("data_gen/regenerate.py",), ("data_gen/harvest.py",), ("train/eagle3.py",),
            ("export/head.py", "--no-serve-check"),  # it is served in vLLM to be compared
        ):  # fmt: skip
            run_script(script, [*self._overrides(), *options])
        self.state.phase = "compare"
        self.note("trained", candidate.name, f"{time.monotonic() - started:.0f} s from captured text to a head")

    def _compare(self) -> None:
        state, candidate = self.state, self.candidate
        run_script("eval/acceptance.py", [*self._overrides(), "--no-tables"])
        rows = read_acceptance(candidate.results_dir / KIND)
        rows = rows[~rows.prompt_id.isin(rows.prompt_id[rows.repeated > LOOP_LIMIT])]  # whoever's response loops
        candidate_rows, served_rows = (rows[rows.method == name] for name in (HEAD, SERVED))
        decision = decide(served_rows, candidate_rows, self.recipe.adapt.max_regression)
        if decision.promoted and self.recipe.adapt.trial_requests:
            state.phase, state.turn_s = "trial", TURN_S
            self._compare_from_now()
            self.note("trial", candidate.name, decision.why, gains=decision.figures())
        else:
            self._judge(decision)

    def _trial(self) -> None:
        enough, start = max(self.recipe.adapt.trial_requests, FEWEST_PROMPTS), self.state.reference_from
        since = [r for r in self.records("counts") if r["at"] >= start and r["drafts"]]
        sides = [
            [r | {"category": r["workload"]} for r in since if r["head"] == str(self.head_dir(name))]
            for name in (self.served.name, self.candidate.name)
        ]
        if min(map(len, sides)) >= enough:
            self._judge(decide(pd.DataFrame(sides[0]), pd.DataFrame(sides[1]), self.recipe.adapt.max_regression))
        elif sum(r["head"] == MIXED for r in since) > 10 * enough:  # responses take longer than turns
            self.state.turn_s *= 2
            self._compare_from_now()
            self.save()

    def _judge(self, decision: PromotionDecision) -> None:
        """Promote the candidate, or refuse it."""
        state, name = self.state, self.candidate.name
        state.phase = "watch"
        self._compare_from_now()
        if decision.promoted:
            state.heads.append(Head(name=name, since=state.reference_from))
            state.probation = True
        elif state.attempt < ATTEMPTS:
            state.phase = "collect"
        self.note("in service" if decision.promoted else "refused", name, decision.why, gains=decision.figures())

    def request_roll_back(self) -> Head:
        """Ask whoever runs the loop to put the head before the one in service back; returns that.

        Raises:
            ValueError: there is none.
        """
        if len(self.state.heads) < 2:
            raise ValueError(f"{self.served.name} is the first head in service: there is none to roll back to")
        (folder(self.recipe) / _REQUEST).write_text(self.served.name)
        return self.state.heads[-2]

    def answer_request(self) -> bool:
        """Roll back if that was asked for; returns whether it was."""
        if asked := (request := folder(self.recipe) / _REQUEST).exists():
            if request.read_text() == self.served.name:  # otherwise it was done, or another head came meanwhile
                self._roll_back("asked for")
            request.unlink()
        return asked

    def _roll_back(self, why: str) -> None:
        state = self.state
        state.heads.pop()
        state.phase, state.probation = "watch", False
        self._compare_from_now()
        self.served.since = state.reference_from
        self.note("rolled back", self.served.name, why)

    def _compare_from_now(self) -> None:
        self.state.reference_from, self.state.reference = time.time(), []

    # ---- The cycle's copies of captured text ----

    @property
    def _copies(self) -> tuple[Path, Path]:
        return self.candidate.prompts_dir.parent, self.candidate.results_dir

    @property
    def _rows(self) -> Path:
        """The file that the prompts stage reads."""
        return self._copies[0] / "captured.jsonl"

    def _delete_captured_copies(self) -> None:
        """Delete the copies; head and run stay."""
        for directory in self._copies:
            shutil.rmtree(directory.resolve(), ignore_errors=True)
            if directory.is_symlink():
                directory.unlink()

    def _restart_cycle(self) -> None:
        """Train another candidate where copies in memory are gone, with the machine's power."""
        if any(directory.is_symlink() and not directory.exists() for directory in self._copies):
            self._delete_captured_copies()
            self.state.cycle, self.state.phase = self.state.cycle + 1, "train"
            self.note("training", self.candidate.name, "the copies in memory of the one before are gone")

    # ---- The stages ----

    def _overrides(self) -> list[str]:
        """What the stages are told: the recipe, which rows, which weights, which heads are compared."""
        paths = self.head_dir(self.served.name), self._rows
        served, rows = (json.dumps(str(path), ensure_ascii=False) for path in paths)  # quoted, which YAML reads
        source = f"{{name: captured, path: {rows}, train: 1000000000, heldout: 1000000000}}"
        return [
            *self.command, f"name={self.candidate.name}", "data=null", "prompts.path=null",
            f"prompts.sources=[{source}]", "prompts.max_train=null", "prompts.max_heldout=null",
            "responses.regenerate=false", "states.spool_shards=null",
            f"train.init_from=runs/{self.served.name}",
            f"eval.methods=[{{name: {SERVED}, method: {HEAD}, head: {served}}}, {HEAD}]",
            f"eval.served={HEAD}", "eval.temperatures=0", "eval.workloads=category",
            f"eval.num_draft_tokens={self.recipe.eval.num_draft_tokens}",
            f"eval.reasoning_efforts={self.recipe.eval.reasoning_effort}",
        ]  # fmt: skip


def in_memory(directory: Path) -> None:
    """Make a folder, unless it is there, as a link to a private one in memory: what lies in it is never at rest.

    Raises:
        ValueError: the machine has no such place.
    """
    if not directory.exists():
        if not _MEMORY.is_dir():
            raise ValueError(f"{KEY} is set, and {_MEMORY} is missing, where a candidate's copies of captured text lie")
        make_folder(directory.parent)
        directory.symlink_to(tempfile.mkdtemp(prefix=f"{directory.name}-", dir=_MEMORY))


def run_loop(loop: Loop, server: Control, ended: Callable[[], bool], noted: Callable[[Loop], Any]) -> None:
    """Step until `ended` says so and nothing is in progress; `noted` is called after each event."""
    over, events = False, 0
    try:
        while not over:
            over = ended()  # before the step, which may be the one that sees the last requests
            loop.answer_request()  # made during a step of minutes; the server has been told already
            server.load(loop.head_dir(loop.head_to_serve()))
            while loop.answer_request():  # asked for between the two
                server.load(loop.head_dir(loop.head_to_serve()))
            loop.step()
            if len(loop.state.history) > events:
                events, over = len(loop.state.history), False
                noted(loop)
            time.sleep(0 if over else POLL_S)
    finally:
        if loop.state.phase == "trial":  # a candidate in its turn does not go on serving without a loop
            loop.answer_request()
            with suppress(ValueError):
                server.load(loop.head_dir(loop.served.name))
