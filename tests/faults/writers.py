"""Two users of the writers in drafthead/artifacts.py and files.py: an artifact of parts, and a run with checkpoints.

python -m tests.faults.writers NAME ROOT RECORD   runs one, with its operations recorded
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from drafthead import artifacts, files
from drafthead.data.responses import part_path, write_part
from drafthead.data.shard import shard_path, write_shard
from drafthead.training import checkpoint
from drafthead.training.metrics import MetricsLog, StepMetrics
from tests.artifacts import response
from tests.data.sequences import sequence
from tests.faults.power_loss import Recorder

ARTIFACT, RUN, STEPS, EVERY = "data/states", "runs/small", 6, 2


def write_artifact(root: Path, done: Callable[[str], None]) -> None:
    """Shards, a part and a file in a folder of its own; `done` is told of each file that has to stay."""
    directory = root / ARTIFACT
    if artifacts.begin(directory, "states", {"made": "of nothing"}):
        return
    parts: dict[Path, Callable[[Path], None]] = {
        shard_path(directory, i): lambda path: write_shard(path, [sequence(path.name, 3)], 5) for i in range(2)
    }
    parts[part_path(directory, 0)] = lambda path: write_part(path, [response("a", 2, 3)])
    parts[directory / "more" / "notes.json"] = lambda path: files.write_json(path, ["note"])
    for path, write in parts.items():
        if not path.exists():
            write(path)
        done(str(path.relative_to(root)))
    artifacts.finish(directory, {"parts": len(parts)})
    done(f"{ARTIFACT}/{artifacts.MANIFEST}")


class _OneRank:
    is_main_process = True

    def wait_for_everyone(self) -> None:
        pass

    def log(self, *_values: Any, **_options: Any) -> None:
        pass


class _Engine:
    """Writes as DeepSpeed does, which no sync follows."""

    def __init__(self, step: int):
        self._step = step

    def save_checkpoint(self, folder: str, tag: str, save_latest: bool) -> None:
        assert not save_latest
        (Path(folder) / tag).mkdir(parents=True)
        torch.save({"step": torch.tensor(self._step)}, Path(folder) / tag / "mp_rank_00_model_states.pt")


def write_run(root: Path, done: Callable[[str], None]) -> None:
    """A run of a few steps that keeps its newest checkpoint; `done` is told of each."""
    directory, rank = root / RUN, _OneRank()
    if artifacts.begin(directory, "run", {"made": "of nothing"}, thinned=True, alone=True):
        return
    checkpoint.remove_leftovers(directory)
    found = checkpoint.newest(directory)
    first = found[1].step if found else 0
    if found:
        checkpoint.retain(directory, 1, found[1])
    log = MetricsLog(rank, directory, first, STEPS)
    for step in range(first + 1, STEPS + 1):
        log.step(StepMetrics(step, 1 / step, (1.0,), (0.5,), 1.0, 1e-3, 0.0, 1.0, (0.5,)), tokens=10)
        if step % EVERY == 0:
            state = checkpoint.TrainState(step, 1, 0, 1.5, step, 1.5)
            checkpoint.save(rank, _Engine(step), directory, state, {"weight": torch.full((4,), float(step))})
            done(str(checkpoint.checkpoint_dir(directory, step).relative_to(root)))
            checkpoint.retain(directory, 1, state)
    artifacts.finish(directory, {"step": STEPS})


WRITERS = {"artifact": write_artifact, "run": write_run}


def main() -> None:
    name, root, record = sys.argv[1:4]
    recorder = Recorder(Path(root), Path(record))
    with recorder.recording():
        WRITERS[name](Path(root), recorder.mark)


if __name__ == "__main__":
    main()
