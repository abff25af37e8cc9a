"""Checkpoints: whole or absent, verified before they are trusted.

    checkpoints/step_00000050/
        model.safetensors     consolidated float32 weights with d2t and t2d: all that export reads
        state.json            step, world size, ZeRO stage, learning so far
        deepspeed/            DeepSpeed's own resume state, read back only by the trainer that wrote it
        manifest.json         size and SHA-256 of every file above, written last

A checkpoint is written under a temporary name and renamed when its manifest is on disk; the newest one
whose files all verify is resumed. DeepSpeed's `latest` file is no marker: it loads zeroed or missing
optimiser files without an error.
"""

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from drafthead.provenance import MANIFEST, ArtefactError, read_json, sha256_file, sync, verify_files, write_json

MODEL_FILE = "model.safetensors"
_STATE = "state.json"
_ENGINE = "deepspeed"


@dataclass(frozen=True)
class TrainState:
    """Where training stands.

    Attributes:
        step: optimiser steps done.
        world_size: ranks that wrote the checkpoint.
        zero_stage: of the run.
        acceptance_length: predicted on the validation split at this step.
        best_step: step of the best checkpoint so far.
        best_acceptance_length: its predicted acceptance length.
    """

    step: int
    world_size: int
    zero_stage: int
    acceptance_length: float
    best_step: int
    best_acceptance_length: float


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    """Where the checkpoint of a step lies."""
    return run_dir / "checkpoints" / f"step_{step:08d}"


def save(accelerator: Any, engine: Any, run_dir: Path, state: TrainState, weights: dict[str, Tensor]) -> Path:
    """Write a checkpoint; every rank calls this.

    Args:
        accelerator: of the run.
        engine: the DeepSpeed engine.
        run_dir: the run.
        state: to be resumed from.
        weights: consolidated float32 tensors; only rank 0's are written.
    """
    final = checkpoint_dir(run_dir, state.step)
    temporary = final.with_name(f".{final.name}.tmp")
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    engine.save_checkpoint(str(temporary / _ENGINE), tag="state", save_latest=False)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, temporary / MODEL_FILE)
        write_json(temporary / _STATE, asdict(state))
        files = [p for p in sorted(temporary.rglob("*")) if p.is_file()]
        for path in files:
            sync(path)
        entries = {str(p.relative_to(temporary)): {"bytes": p.stat().st_size, "sha256": sha256_file(p)} for p in files}
        write_json(temporary / MANIFEST, {"files": entries})
        shutil.rmtree(final, ignore_errors=True)  # an unverifiable one of the same step
        temporary.rename(final)
        sync(final.parent)
    accelerator.wait_for_everyone()
    return final


def newest(run_dir: Path) -> tuple[Path, TrainState] | None:
    """The newest checkpoint whose files all match its manifest, or None; damaged ones are reported."""
    for path in sorted((run_dir / "checkpoints").glob("step_*"), reverse=True):
        try:
            broken = verify_files(path)
        except (ArtefactError, FileNotFoundError) as error:
            broken = [str(error)]
        if not broken:
            return path, TrainState(**read_json(path / _STATE))
        print(f"checkpoint {path.name} is damaged ({', '.join(broken)}): trying an older one")
    return None


def load(engine: Any, path: Path, state: TrainState, world_size: int, zero_stage: int) -> None:
    """Restore the engine from a verified checkpoint.

    Raises:
        ArtefactError: it was written by another number of ranks or another ZeRO stage, or does not load.
    """
    if (state.world_size, state.zero_stage) != (world_size, zero_stage):
        raise ArtefactError(
            f"{path} was written by {state.world_size} ranks at ZeRO {state.zero_stage}; this run has {world_size} "
            f"ranks at ZeRO {zero_stage}. Resume with the same numbers, or start anew under another name"
        )
    loaded, _ = engine.load_checkpoint(str(path / _ENGINE), tag="state")
    if loaded is None or engine.global_steps != state.step:
        raise ArtefactError(
            f"{path} did not load: it says step {state.step}, DeepSpeed restored step {engine.global_steps}; "
            f"delete {path} to resume from an older checkpoint"
        )


def retain(run_dir: Path, keep: int, best_step: int) -> None:
    """Delete all but the `keep` newest checkpoints and the best one."""
    paths = sorted((run_dir / "checkpoints").glob("step_*"))
    for path in paths[:-keep]:
        if path != checkpoint_dir(run_dir, best_step):
            shutil.rmtree(path)
