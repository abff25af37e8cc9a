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

import io
import logging
import pickle
import re
import shutil
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from drafthead.artifacts import MANIFEST, ArtifactError, file_entries, read_json, verify_files
from drafthead.config.train import TrainConfig
from drafthead.drafters.trained import MODEL_FILE, STATE_FILE, checkpoint_dir
from drafthead.drafters.vocabulary import DraftVocabulary
from drafthead.files import check_space, delete_folder, make_folder, sync, write_json
from drafthead.training.metrics import METRICS

_COPIES = 5  # of the weights, at most: consolidated, the engine's, its master and two moments
_ENGINE = "deepspeed"
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainState:
    """Where training stands.

    Attributes:
        step: number of optimiser steps done.
        world_size: ranks that wrote the checkpoint.
        zero_stage: ZeRO stage of the run.
        acceptance_length: acceptance length predicted by the last validation.
        acceptance_per_position: joint prefix acceptance of draft tokens 1..K, from the last validation.
        best_step: step of the best checkpoint so far.
        best_acceptance_length: predicted acceptance length of the best checkpoint.
        prompts, looping: validation responses that it was predicted on, and whether all of them loop.
        without_rise: number of validations since the best one.
        measured: the acceptance is of this step; False where the checkpoint was written between two validations.
    """

    step: int
    world_size: int
    zero_stage: int
    acceptance_length: float
    best_step: int
    best_acceptance_length: float
    acceptance_per_position: tuple[float, ...] = ()
    prompts: int = 0
    looping: bool = False
    without_rise: int = 0
    measured: bool = True


def save(accelerator: Any, engine: Any, run_dir: Path, state: TrainState, weights: dict[str, Tensor]) -> None:
    """Write a checkpoint; every rank calls this.

    Args:
        accelerator: accelerate's Accelerator of the run.
        engine: the DeepSpeed engine.
        run_dir: directory of the run.
        state: training state to resume from.
        weights: consolidated float32 tensors; only rank 0's are written.

    Raises:
        DiskFullError: it does not fit; the checkpoints before it are intact.
    """
    final = checkpoint_dir(run_dir, state.step)
    temporary = final.with_name(f".{final.name}.tmp")
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        make_folder(final.parent)
        # Before the first byte: what DeepSpeed's writer says of a full disk names neither disk nor file.
        check_space(final, _COPIES * sum(tensor.nbytes for tensor in weights.values()))
        temporary.mkdir()
    accelerator.wait_for_everyone()
    engine.save_checkpoint(str(temporary / _ENGINE), tag="state", save_latest=False)
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        save_file({name: tensor.contiguous() for name, tensor in weights.items()}, temporary / MODEL_FILE)
        write_json(temporary / STATE_FILE, asdict(state))
        written = sorted(temporary.rglob("*"))
        # With the entries of metrics before it, which it must not outlive; folders too, for the names in them.
        for path in (run_dir / METRICS, *written):
            sync(path)
        names = [str(path.relative_to(temporary)) for path in written if path.is_file()]
        write_json(temporary / MANIFEST, {"files": file_entries(temporary, names)})
        shutil.rmtree(final, ignore_errors=True)  # an unverifiable one of the same step
        temporary.rename(final)
        sync(final.parent)
    accelerator.wait_for_everyone()


def consolidated(accelerator: Any, engine: Any) -> dict[str, Tensor]:
    """float32 weights on the CPU under their exported names; every rank calls this."""
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {}
    for name, parameter in accelerator.unwrap_model(engine).draft.named_parameters():
        full = safe_get_full_fp32_param(parameter)
        if full is None:  # without a ZeRO optimiser the parameter is the master
            full = parameter
        weights[name] = full.detach().float().cpu().clone()
    return weights


def newest(run_dir: Path) -> tuple[Path, TrainState] | None:
    """The newest checkpoint whose files all match its manifest, or None; damaged ones are reported."""
    for path in sorted((run_dir / "checkpoints").glob("step_*"), reverse=True):
        try:
            if not (broken := verify_files(path)):
                state = read_json(path / STATE_FILE)
                return path, TrainState(**{**state, "acceptance_per_position": tuple(state["acceptance_per_position"])})
        except (ArtifactError, FileNotFoundError) as error:
            broken = [str(error)]
        logger.warning("checkpoint %s is damaged (%s): trying an older one", path.name, ", ".join(broken))
    return None


def load(accelerator: Any, engine: Any, path: Path, state: TrainState) -> None:
    """Restore the engine from a verified checkpoint; every rank calls this.

    On another number of ranks than wrote it, rank 0 first converts it to DeepSpeed's universal format. ZeRO 0
    keeps everything on every rank and needs no conversion.

    Args:
        accelerator: accelerate's Accelerator of the run.
        engine: the DeepSpeed engine.
        path: directory of the checkpoint.
        state: training state that the checkpoint recorded.

    Raises:
        ArtifactError: it does not load.
    """
    folder, tag = path / _ENGINE, "state"
    reshaped = state.world_size != accelerator.num_processes and state.zero_stage > 0
    with _nothing_runs(path):
        if reshaped:
            folder, tag = path.with_name(f".{path.name}.universal"), "universal"
            if accelerator.is_main_process:
                _convert(path / _ENGINE / "state", folder / tag)
            accelerator.wait_for_everyone()
            engine._config.load_universal_checkpoint = True  # DeepSpeed asks for it before a checkpoint is known
        loaded, _ = engine.load_checkpoint(str(folder), tag=tag)
    if loaded is None or engine.global_steps != state.step:
        raise ArtifactError(
            f"{path} did not load: it says step {state.step}, DeepSpeed restored step {engine.global_steps}; "
            f"delete {path} to resume from an older checkpoint"
        )
    if reshaped:
        engine._config.load_universal_checkpoint = False
        _to_parameters(engine.optimizer.optimizer)
        accelerator.wait_for_everyone()
        if accelerator.is_main_process:
            delete_folder(folder)


@contextmanager
def _nothing_runs(path: Path) -> Iterator[None]:
    """Load DeepSpeed's state without running code from it.

    It is a pickle, which DeepSpeed opens in many places with weights_only=False. torch's own switch overrules that:
    tensors, plain values and DeepSpeed's three classes are made, anything else is refused unmade.

    Raises:
        ArtifactError: the state holds something else.
    """
    from accelerate.utils import patch_environment
    from deepspeed.runtime.fp16.loss_scaler import LossScaler
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    members = ZeroStageEnum.__members__

    def member(kind: object, name: str) -> Any:
        """Python before 3.11.4 writes a member of an enum as getattr(kind, name): nothing else is got."""
        if kind is not ZeroStageEnum:
            raise pickle.UnpicklingError(f"getattr of {kind!r}")
        return members[name]

    known = [LossScaler, ZeroStageEnum, fragment_address, (member, "builtins.getattr")]
    try:
        with patch_environment(torch_force_weights_only_load=1), torch.serialization.safe_globals(known):
            yield
    except pickle.UnpicklingError as error:
        # What follows is torch's advice to load it all the same.
        match = re.search(r"WeightsUnpickler error: (.+?)(?: was not an allowed|$)", str(error), re.MULTILINE)
        reason = match[1] if match else str(error).partition("\n")[0]
        raise ArtifactError(
            f"{path} contains objects other than DeepSpeed state and was not loaded ({reason}); it was modified after "
            "it was written: delete it to resume from an older checkpoint"
        ) from error


def _convert(source: Path, destination: Path) -> None:
    """Write DeepSpeed's universal form of a checkpoint: one file per parameter, whatever the number of ranks."""
    from deepspeed.checkpoint import ds_to_universal

    shutil.rmtree(destination, ignore_errors=True)  # of a killed run
    options = Namespace(
        input_folder=str(source), output_folder=str(destination), num_extract_workers=1, num_merge_workers=1,
        keep_temp_folder=False, strict=True, inject_missing_state=True,
    )  # fmt: skip
    with redirect_stdout(io.StringIO()):  # it narrates every parameter
        ds_to_universal.main(options)


def _to_parameters(optimizer: torch.optim.Optimizer) -> None:
    """Move the states to their parameters' device: DeepSpeed leaves the steps of its universal form on the CPU, and a
    fused AdamW on CUDA refuses them."""
    for parameter, state in optimizer.state.items():
        state.update({name: t.to(parameter.device) for name, t in state.items() if isinstance(t, Tensor)})


def retain(run_dir: Path, keep: int, state: TrainState) -> None:
    """Delete all but the `keep` newest checkpoints and the best one, as of the newest that verified.

    What is newer than `state` is damaged, counts for nothing and is written again.
    """
    verified = checkpoint_dir(run_dir, state.step)
    paths = [path for path in sorted((run_dir / "checkpoints").glob("step_*")) if path <= verified]
    for path in paths[:-keep]:
        if path != checkpoint_dir(run_dir, state.best_step):
            # Out of sight first: killed while it is deleted, it would look like a damaged checkpoint.
            delete_folder(path.rename(path.with_name(f".{path.name}.old")))
            sync(path.parent)  # a complete run is not opened again, so a lost deletion would stay


def remove_leftovers(run_dir: Path) -> None:
    """Delete what a killed run was writing, converting or deleting."""
    for path in (run_dir / "checkpoints").glob(".step_*"):
        delete_folder(path)


def restore(
    run_dir: Path, config: TrainConfig, accelerator: Any, engine: Any, vocabulary: DraftVocabulary
) -> TrainState:
    """Where training stands: the newest whole checkpoint, loaded into the engine; every rank calls this.

    Raises:
        ArtifactError: it does not load, or rows of lm_head would stand for other tokens.
        ValueError: it cannot be resumed on this number of ranks.
    """
    from accelerate.utils import broadcast_object_list

    ranks = accelerator.num_processes
    # Verifying reads every byte: once, and all ranks go by the same answer.
    resumable = None
    if accelerator.is_main_process:
        remove_leftovers(run_dir)
        resumable = newest(run_dir)
    (resumable,) = broadcast_object_list([resumable])
    if resumable is None:
        return TrainState(0, ranks, config.zero_stage, 0.0, 0, 0.0)
    path, state = resumable
    check_vocabulary(path, vocabulary)
    if state.world_size != ranks and config.optimizer == "muon":
        raise ValueError(
            f"{path} was written by {state.world_size} ranks and this run has {ranks}: DeepSpeed's universal "
            f"checkpoint leaves out the moments of train.optimizer muon. Resume with {state.world_size} ranks"
        )
    load(accelerator, engine, path, state)
    if accelerator.is_main_process:
        retain(run_dir, config.keep_checkpoints, state)  # the run may have ended between writing it and retention
    reshaped = "" if state.world_size == ranks else f" (written by {state.world_size} ranks, now {ranks})"
    logger.info("resuming from step %d%s", state.step, reshaped)
    return state


def check_vocabulary(path: Path, vocabulary: DraftVocabulary) -> None:
    """Refuse to go on with rows of lm_head that stand for other tokens.

    Raises:
        ArtifactError: the checkpoint's d2t is not the one that target and texts give today.
    """
    with safe_open(path / MODEL_FILE, framework="pt") as file:
        if not torch.equal(file.get_tensor("d2t"), vocabulary.d2t):
            raise ArtifactError(
                f"{path} has another draft vocabulary than target and texts give today: the target's tokenizer or "
                "generation_config.json, or transformers, has changed since the run began. Restore it, or give the "
                "recipe another name (name=...)"
            )
