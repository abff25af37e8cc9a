"""A chain of stages to be killed one after the other, the table of what happened, and a head to damage."""

import os
import random
import time
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path

import pytest

from tests.exporting.runs import recipe_at, write_random_head
from tests.faults.harness import Hit, Phase, Target, Undisturbed, finish, kill_once, run_undisturbed
from tests.faults.stages import STAGES, Stage, newest_checkpoint, progress, steps_done

_COLUMNS = ("stage", "killed", "moment", "left behind", "then")
EVERY = 8  # steps between checkpoints, see SMALL


class Campaign:
    """All stages share `root`: each is run undisturbed, then killed in a cleared folder and resumed."""

    def __init__(self, root: Path, seed: int, *overrides: str):
        self.root, self.seed, self.overrides = root, seed, overrides
        self.chain = dict(STAGES)
        self.rows: list[tuple[str, ...]] = []
        self.undisturbed: dict[str, Undisturbed] = {}
        self._began = time.monotonic()

    def run(self, name: str) -> Undisturbed:
        """The undisturbed run of a stage, made once, after those of the stages before it."""
        for stage in self.chain.values():
            if stage.name not in self.undisturbed:
                stage.clear(self.root)
                self.undisturbed[stage.name] = run_undisturbed(stage, self.root, *self.overrides)
            if stage.name == name:
                break
        return self.undisturbed[name]

    def kill(self, name: str, moments: Iterable[tuple[Phase, Target]], chooser: random.Random, hits: int) -> None:
        """Kill a stage until `hits` kills have hit, resume it to its end and compare.

        Every file that has its name is compared with the undisturbed run's after every kill.
        """
        stage, usual = STAGES[name], self.undisturbed[name]
        stage.clear(self.root)
        done = 0
        planned: Iterator[tuple[Phase, Target]] = cycle(moments)
        while done < hits:
            before = progress(stage, self.root, usual.payload)
            hit = kill_once(stage, self.root, usual, *next(planned), chooser, *self.overrides)
            if hit is None:  # over before: that is a resume, too
                self._compare(stage, usual)
                stage.clear(self.root)
                continue
            done += 1
            self._check_what_is_there(stage, usual)
            after = progress(stage, self.root, usual.payload)
            self._note(stage, usual, hit, f"{before} → {after}", "every file there whole")
        seconds = finish(stage, self.root, *self.overrides)
        self._compare(stage, usual)
        *rows, last = self.rows
        self.rows = [*rows, (*last[:-1], f"{last[-1]}; resumed: same payload in {seconds:.0f} s")]

    def _check_what_is_there(self, stage: Stage, usual: Undisturbed) -> None:
        found = stage.payload(self.root, finished=False)
        different = {name for name, digest in found.items() if usual.payload.get(name, digest) != digest}
        assert not different, f"{stage.name}: half written or different: {sorted(different)}"
        if stage.ranks:
            run = self.root / stage.writes[0]
            assert newest_checkpoint(run) >= (steps_done(run) - 1) // EVERY * EVERY, "more than allowed is lost"

    def _compare(self, stage: Stage, usual: Undisturbed) -> None:
        found = stage.payload(self.root)
        names = sorted({*found, *usual.payload})
        different = [name for name in names if found.get(name) != usual.payload.get(name)]
        assert not different, f"{stage.name}: not as undisturbed after the resume: {different}"
        assert not stage.leftovers(self.root), f"{stage.name} left behind what a killed run wrote"

    def _note(self, stage: Stage, usual: Undisturbed, hit: Hit, left: str, then: str) -> None:
        moment = f"{hit.phase}, {hit.seconds:.1f} s ({hit.seconds / usual.seconds:.0%}), {hit.names} names"
        self.rows.append((stage.name, hit.victim, moment, left, then))
        print(" | ".join(self.rows[-1]), flush=True)

    def table(self) -> str:
        """What happened, in Markdown."""
        minutes = (time.monotonic() - self._began) / 60
        about = (
            f"{datetime.now(UTC):%Y-%m-%d}, seed {self.seed}: {len(self.rows)} kills in "
            f"{len({row[0] for row in self.rows})} stages, {minutes:.0f} minutes."
        )
        lines = [_COLUMNS, ("---",) * len(_COLUMNS), *self.rows]
        return "\n".join([about, "", *("| " + " | ".join(line) + " |" for line in lines)])


@pytest.fixture(scope="session")
def fault_seed() -> int:
    """Of every random choice; DRAFTHEAD_FAULT_SEED repeats them, though no machine repeats its times."""
    seed = int(os.environ.get("DRAFTHEAD_FAULT_SEED") or time.time_ns() % 2**32)
    print(f"DRAFTHEAD_FAULT_SEED={seed}")  # shown when a test fails
    return seed


@pytest.fixture
def chooser(request: pytest.FixtureRequest, fault_seed: int) -> random.Random:
    """Choices of one test: the same for the same seed, whatever else runs."""
    return random.Random(f"{fault_seed} {request.node.name}")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A public head of the embedded target."""
    return write_random_head(recipe_at(tmp_path_factory.mktemp("public")))


@pytest.fixture(scope="module")
def campaign(tmp_path_factory: pytest.TempPathFactory, fault_seed: int) -> Campaign:
    """One kill per stage, two ranks in training, one method beside the baseline; in bf16, as large targets are."""
    short = ("target.dtype=bfloat16", "eval.methods=[head]", "eval.workloads=all", "train.epochs=4")
    campaign = Campaign(tmp_path_factory.mktemp("faults"), fault_seed, *short)
    del campaign.chain["train, 1 rank"]
    return campaign


@pytest.fixture(scope="module")
def soak_campaign(tmp_path_factory: pytest.TempPathFactory, fault_seed: int) -> Iterator[Campaign]:
    """Many kills per stage, with all methods; ends with the table."""
    campaign = Campaign(tmp_path_factory.mktemp("soak"), fault_seed)
    yield campaign
    print(f"\n\n{campaign.table()}")
